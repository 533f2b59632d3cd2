"""metrics.jsonl holds every step once despite interruptions; wandb continues one run."""

import json
import math
import re
import resource
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

from arpo_megatron.config import JobConfig, MonitorConfig
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.samples import SampledLeaf, sample_leaves
from arpo_megatron.monitor.wandb_run import WandbRun, add_evaluation
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.json_lines import json_lines
from tests.tools_sandbox.helpers.services import wait_until

CONFIG = JobConfig(name="test")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_write_each_step_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG)
    log.log({"step": 1, "reward": np.float32(0.5), "forks": np.int64(3), "note": "first", "gap": None})
    (row,) = rows_of(tmp_path)
    assert abs(row.pop("time") - time.time()) < 60
    assert row == {"step": 1, "reward": 0.5, "forks": 3, "note": "first", "gap": None}
    log.log({"step": 2, "reward": math.nan, "gap": np.inf})
    last = rows_of(tmp_path)[1]
    assert last.pop("time") >= 0 and last == {"step": 2, "reward": None, "gap": None}
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


def test_damaged_line_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG)
    for step in (1, 2, 3):
        log.log({"step": step, "run": 1})
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0\xff" * 8 + b"\n" + lines[2] + b"\0" * 8 + b"\n")  # after a power loss
    MetricsLog(tmp_path, CONFIG).log({"step": 3, "run": 2})
    found = [row and (row["step"], row["run"]) for _, row in json_lines(file.read_bytes())]
    assert found == [(1, 1), None, None, (3, 2)]


def test_metrics_cut_off_a_half_written_line(tmp_path: Path) -> None:
    MetricsLog(tmp_path, CONFIG).log({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    MetricsLog(tmp_path, CONFIG).log({"step": 2})
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


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


def wandb_config(monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monitor = MonitorConfig(
        wandb="offline", wandb_entity="team", wandb_group="search", wandb_tags=("a", "b"), wandb_notes="why"
    )
    return JobConfig(name="test", monitor=monitor)


def test_wandb_offline_keeps_one_run_id_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = wandb_config(monkeypatch)
    for step in (1, 2):
        log = MetricsLog(tmp_path, config)
        log.log({"step": step, "reward": 0.5})
        assert log.wandb is not None
        run = log.wandb._run
        assert run.config["slurm_job_id"] == "4711" and run.config["code"]
        assert (run.group, run.tags, run.job_type) == ("search", ("a", "b"), "rl")
        assert (run.entity, run.project, run.notes) == ("team", "arpo-megatron", "why")
        assert re.fullmatch(rf"wandb sync {tmp_path}/wandb/offline-run-\S+", log.wandb.place)
        log.close()
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def records_of(run: Path) -> list[Any]:
    """Return the records that `wandb sync` would send."""
    records = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, position, parts = file.read_bytes(), 7, b""  # a LevelDB log after a header
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:  # no room for a header in this block
                position += 32768 - position % 32768
                continue
            length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
            parts += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # whole, or the last part
                records.append(Record.FromString(parts))
                parts = b""
    return records


def test_wandb_gets_artifacts_samples_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = wandb_config(monkeypatch)
    (tmp_path / "config.yaml").write_text("name: test\n")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_bytes(b"weights")
    run = WandbRun(tmp_path, config)
    run.log_samples(3, [SampledLeaf(3, "t0", "1+1?", "2", "<answer>2</answer>", "2", 1.0, 1.0, 0)])
    run.log_export(tmp_path / "export")
    run.close()
    assert add_evaluation(tmp_path, config, {"gsm8k": {"accuracy": 0.5, "metric": "math"}}).startswith(
        "wandb: wandb sync"
    )
    # wandb's service writes the end of the file after the run has been closed.
    wait_until(lambda: sum(record.HasField("exit") for record in records_of(tmp_path)) == 2)
    records = records_of(tmp_path)
    artifacts = {record.artifact.type: record.artifact for record in records if record.HasField("artifact")}
    assert set(artifacts) >= {"config", "model"}
    references = [entry.ref for entry in artifacts["model"].manifest.contents]
    assert references == [(tmp_path / "export" / "model.safetensors").as_uri()], "the weights are not uploaded"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == [[3, "t0", "1+1?", "2", "<answer>2</answer>", "2", 1.0, 1.0, 0]]
    summaries = {item.key or "/".join(item.nested_key) for r in records for item in r.summary.update}
    assert "eval/gsm8k/accuracy" in summaries and "eval/gsm8k/metric" not in summaries


def events_of(file: Path) -> Iterator[Event]:
    """Read the records of an event file: length, checksum, event, checksum."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_has_the_numbers_of_each_step_once(tmp_path: Path) -> None:
    config = JobConfig(name="test", monitor=MonitorConfig(tensorboard=True))
    for steps in ((1, 2), (2, 3)):  # a resumed run repeats its last step
        log = MetricsLog(tmp_path, config)
        for step in steps:
            log.log({"step": step, "reward": step / 4, "number_format": "float32", "gap": None})
        log.close()
    values, purged = {}, []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        for event in events_of(file):
            if event.HasField("session_log"):
                purged.append(event.step)
            values |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    assert values == {(step, "reward"): step / 4 for step in (1, 2, 3)}
    assert purged == [1, 2], "TensorBoard drops what an earlier file has from there"


def test_a_sample_is_one_trajectory_of_each_tree_and_changes_with_the_step() -> None:
    tree = RolloutTree("t0", [9])
    call = tree.add(0, Role.MODEL, [1, 2])
    tree.add(tree.add(call, Role.TOOL, [3]), Role.MODEL, [5])
    tree.add(0, Role.MODEL, [6])
    task = Task("t0", ({"role": "user", "content": "1+1?"},), "2", "math", "")
    ones, right = np.ones(2), np.array([True, True])
    item = ScoredTree(task, tree, np.array([1.0, -1.0]), ones, right, answers=["2", None])
    first, second = (sample_leaves([item, item], lambda ids: str(list(ids)), step, 1)[0] for step in (2, 3))
    assert (first.question, first.expected, first.answer, first.reward) == ("1+1?", "2", "2", 1.0)
    assert (second.answer, second.reward, second.response) == ("", -1.0, "[6]")
