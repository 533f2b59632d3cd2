"""metrics.jsonl holds every step once despite interruptions; wandb continues one run."""

import json
import math
import re
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.config import JobConfig, MonitorConfig
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog

CONFIG = JobConfig(name="test")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_write_each_step_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG)
    log.log({"step": 1, "reward": np.float32(0.5), "forks": np.int64(3), "note": "first", "gap": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward": 0.5, "forks": 3, "note": "first", "gap": None}
    ]
    log.log({"step": 2, "reward": math.nan, "gap": np.inf})
    assert rows_of(tmp_path)[1] == {"step": 2, "reward": None, "gap": None}
    log.close()


def test_metrics_of_repeated_steps_replace_old_rows(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, CONFIG)
    for step in (1, 2, 3, 4):
        first.log({"step": step, "run": 1})
    second = MetricsLog(tmp_path, CONFIG)
    for step in (3, 4, 5):
        second.log({"step": step, "run": 2})
    rows = [(row["step"], row["run"]) for row in rows_of(tmp_path)]
    assert rows == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_metrics_cut_off_a_half_written_line(tmp_path: Path) -> None:
    MetricsLog(tmp_path, CONFIG).log({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    MetricsLog(tmp_path, CONFIG).log({"step": 2})
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}]


def test_rows_and_events_that_a_full_disk_refuses_leave_whole_lines_and_rows_are_counted(tmp_path: Path) -> None:
    log, events = MetricsLog(tmp_path, CONFIG), EventLog(tmp_path / "events.jsonl")
    log.log({"step": 1})
    events.emit("note", text="first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the kernel then returns an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # in the middle of a line
    try:
        log.log({"step": 2, "reward": 0.5})
        log.log({"step": 3, "reward": 0.5})
        events.emit("note", text="lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    log.log({"step": 4})
    events.emit("note", text="last")
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 4]
    assert [json.loads(line)["text"] for line in events.path.read_text().splitlines()] == ["first", "last"]
    assert log.close() == 2


def test_metrics_refuse_values_that_are_not_numbers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list"):
        MetricsLog(tmp_path, CONFIG).log({"step": 1, "rewards": [1.0]})


def test_wandb_offline_keeps_one_run_id_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monitor = MonitorConfig(wandb="offline", wandb_entity="team", wandb_group="search", wandb_tags=("a", "b"))
    config = JobConfig(name="test", monitor=monitor)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for step in (1, 2):
        log = MetricsLog(tmp_path, config)
        log.log({"step": step, "reward": 0.5})
        assert log._wandb.config["slurm_job_id"] == "4711" and log._wandb.config["code"]
        assert (log._wandb.group, log._wandb.tags, log._wandb.job_type) == ("search", ("a", "b"), "rl")
        assert re.fullmatch(rf"wandb sync {tmp_path}/wandb/offline-run-\S+", log.place)
        log.close()
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
