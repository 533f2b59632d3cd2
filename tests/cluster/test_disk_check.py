"""The doctor counts the bytes that a run's checkpoints will need."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from arpo_megatron.cluster.profile import ClusterProfile, check_profile
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.machine import check_disk


def profile(**values: object) -> ClusterProfile:
    return check_profile({"account": "a", "runs": "/tmp", **values}, "here")


def job(*overrides: str) -> JobConfig:
    return resolve.resolve("quickstart", overrides=overrides)


def test_disk_check_fails_if_checkpoints_do_not_fit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "first")
    assert check_disk(job(), run).level == "ok"
    large = resolve.resolve("deepsearch_14b", overrides=["train.keep_checkpoints=20"])
    found = check_disk(large, run)  # of an unknown model
    assert (
        "4343.0 GB are needed for checkpoints" in found.text
    )  # 21 of 14,768,307,200 parameters, 14 bytes each, and 1 GiB
    assert found.level == "failure" and "train.keep_checkpoints" in found.fix
    unknown = check_disk(job(f"model.path={tmp_path}"), run)
    assert unknown.level == "warning" and "is not known" in unknown.text


CHECKPOINT = 14_768_307_200 * 14
"""Bytes of a checkpoint of Qwen3 14B: two for weights and twelve for AdamW's state per parameter."""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the free space of all disks, in checkpoints (plus the reserve of 1 GiB)."""

    def free(checkpoints: float) -> None:
        usage = SimpleNamespace(free=int(checkpoints * CHECKPOINT) + 2**30)
        monkeypatch.setattr("arpo_megatron.launch.preflight.machine.shutil.disk_usage", lambda place: usage)

    return free


def saved(root: Path, *steps: int) -> None:
    """Write sparse checkpoints of that size."""
    for step in steps:
        (folder := root / f"step_{step}" / "actor").mkdir(parents=True)
        with (folder / "weights").open("wb") as file:
            file.truncate(CHECKPOINT)


def test_disk_check_counts_existing_checkpoints_of_a_resumed_run(tmp_path: Path, disk: Callable[[float], None]) -> None:
    """Two checkpoints, and a third during a save, fill the disk in each run of the job."""
    config, run = resolve.resolve("deepsearch_14b", overrides=["train.steps=9"]), RunDirectory(tmp_path)
    for kept in range(3):
        disk(3 - kept)
        found = check_disk(config, run)
        assert found.level == "ok", found
        assert kept == 0 or f"in addition to the {kept * CHECKPOINT / 1e9:.1f} GB of this run" in found.text
        disk(2.9 - kept)
        assert check_disk(config, run).level == "failure"
        saved(run.checkpoints, kept + 1)
    disk(0.9)  # three exist from a larger train.keep_checkpoints: one more is written before they are deleted
    assert check_disk(config, run).level == "failure"


def test_disk_check_counts_permanent_checkpoints(tmp_path: Path, disk: Callable[[float], None]) -> None:
    overrides, run = ["train.steps=10", "train.save_every=1", "train.keep_every=3"], RunDirectory(tmp_path)
    config = resolve.resolve("deepsearch_14b", overrides=overrides)
    disk(4.9)  # 3, 6, 9, 10 and the one during a save
    found = check_disk(config, run)
    assert found.level == "failure" and "train.keep_every" in found.fix
    disk(5)
    assert check_disk(config, run).level == "ok"
    saved(run.checkpoints, 2, 3)  # 2 will be deleted
    disk(3)
    assert check_disk(config, run).level == "ok"


def test_disk_check_counts_sft_checkpoints(tmp_path: Path, disk: Callable[[float], None]) -> None:
    overrides = ["sft.steps=500", "sft.save_every=100", "train.keep_checkpoints=9", "model.hub_id=Qwen/Qwen3-14B"]
    alone = resolve.resolve("sft_7b", overrides=[*overrides, f"sft.data={tmp_path}/chats.jsonl"])
    run = RunDirectory(tmp_path / "run")
    disk(3)
    assert alone.sft_only and check_disk(alone, run).level == "ok"
    disk(2.9)
    found = check_disk(alone, run)
    assert found.level == "failure" and "train." not in found.fix
    both = resolve.resolve("deepsearch_14b", overrides=[*overrides, f"sft.data={tmp_path}/chats.jsonl"])
    disk(12)
    assert check_disk(both, run).level == "ok"
    disk(11.9)
    assert check_disk(both, run).level == "failure"
    run.sft_model.mkdir(parents=True)
    (run.sft_model / "config.json").touch()
    saved(run.sft_checkpoints, 300)
    disk(10)  # the cold start is done, its checkpoints stay
    assert check_disk(both, run).level == "ok"
