"""metrics.jsonl holds every step once, whatever was interrupted; wandb goes on in one run."""

import json
import math
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.config import JobConfig, MonitorConfig
from arpo_megatron.monitor.events import EventLog, EventReader
from arpo_megatron.monitor.metrics import MetricsLog
from tests.faults import small_disk

CONFIG = JobConfig(name="test")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_on_disk_as_one_json_object_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG)
    log.log({"step": 1, "reward": np.float32(0.5), "forks": np.int64(3), "note": "first", "gap": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward": 0.5, "forks": 3, "note": "first", "gap": None}
    ]
    log.log({"step": 2, "reward": math.nan, "gap": np.inf})
    assert rows_of(tmp_path)[1] == {"step": 2, "reward": None, "gap": None}
    log.close()


def test_repeated_steps_of_a_resumed_run_replace_the_old_rows(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, CONFIG)
    for step in (1, 2, 3, 4):
        first.log({"step": step, "run": 1})
    second = MetricsLog(tmp_path, CONFIG)
    for step in (3, 4, 5):
        second.log({"step": step, "run": 2})
    rows = [(row["step"], row["run"]) for row in rows_of(tmp_path)]
    assert rows == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    MetricsLog(tmp_path, CONFIG).log({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    MetricsLog(tmp_path, CONFIG).log({"step": 2})
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}]


def test_what_a_full_disk_refused_is_written_when_there_is_room_again(tmp_path: Path) -> None:
    log, events = MetricsLog(tmp_path, CONFIG), EventLog(tmp_path / "events.jsonl")
    log.log({"step": 1})
    events.emit("note", text="first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the kernel's answer is then an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # in the middle of a line
    try:
        log.log({"step": 2, "reward": 0.5})
        log.log({"step": 3, "reward": 0.5})
        events.emit("note", text="held back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert rows_of(tmp_path) == [{"step": 1}]
    log.log({"step": 4})
    events.emit("note", text="last")
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    assert [json.loads(line)["text"] for line in events.path.read_text().splitlines()] == ["first", "held back", "last"]
    assert log.close() == 0


def test_the_last_rows_are_tried_again_at_the_end_and_those_that_are_lost_are_counted(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG)
    (tmp_path / "metrics.jsonl").mkdir()  # nothing can be written there
    log.log({"step": 1})
    log.log({"step": 2})
    assert log.close() == 2
    (tmp_path / "metrics.jsonl").rmdir()
    assert log.close() == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_events_are_read_at_once_while_the_disk_is_full(tmp_path: Path) -> None:
    """By whoever follows the file; otherwise the terminal would be silent for as long as that lasts."""
    with small_disk(tmp_path, 2**22) as full:
        events = EventLog(tmp_path / "events.jsonl")
        reader = EventReader(events.path)
        events.emit("note", text="there is room")
        with pytest.raises(OSError, match=full), (tmp_path / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(bytes(2**16))
        for step in range(200):  # each as long as that of a step
            events.emit("note", text=f"{step:02000}")
        EventLog(events.path).emit("user_error", text="another process ends")
        kinds = [event["kind"] for event in reader.new()]
        assert kinds == ["note"] * 201 + ["user_error"]
        for step in range(1000):
            events.emit("note", text=f"{step:02000}")
        held = len(reader.new())
        assert 200 < held < 1000, "the room of its own has an end too"
        (tmp_path / "fill").unlink()
        events.emit("note", text="there is room again")
        assert len(reader.new()) == 1001 - held


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list"):
        MetricsLog(tmp_path, CONFIG).log({"step": 1, "rewards": [1.0]})


def test_wandb_is_not_touched_unless_configured(tmp_path: Path) -> None:
    MetricsLog(tmp_path, CONFIG).log({"step": 1})
    assert not (tmp_path / "wandb_run_id").exists()
    assert not (tmp_path / "wandb").exists()


def test_wandb_offline_keeps_one_run_id_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    config = JobConfig(name="test", monitor=MonitorConfig(wandb="offline"))
    for step in (1, 2):
        log = MetricsLog(tmp_path, config)
        log.log({"step": step, "reward": 0.5})
        log.close()
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
