"""Ranks that hang are found in time, their stacks are written, and the rank that cannot answer is named."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.backend import LocalBackend
from arpo_megatron.launch.services import Job, run_trainer
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.processes import ProcessDiedError

RANK = """
import os, signal, sys, time
from pathlib import Path
from arpo_megatron.utils.heartbeat import beat, start_heartbeat
rank = int(os.environ["RANK"])
start_heartbeat(Path(sys.argv[1]) / "heartbeats", rank, float(sys.argv[3]))
def works():
    for _ in range(20): beat(); time.sleep(0.1)
def waits_for_its_peer():
    time.sleep(600)
works()
if rank == 1 and "stopped" in sys.argv: os.kill(os.getpid(), signal.SIGSTOP)
if "ends" not in sys.argv: waits_for_its_peer()
"""


class Ranks(LocalBackend):
    def __init__(self, folder: Path, how: str) -> None:
        super().__init__()
        (folder / "rank_that_hangs.py").write_text(RANK)
        self.folder, self.how = folder, how

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        command, variables = super().ranks(
            "rank_that_hangs", [*arguments, self.how, str(config.parallel.collective_timeout_s)], config
        )
        return command, {**variables, "PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}"}


def train(folder: Path, how: str, timeout_s: float = 6.0) -> RunDirectory:
    run = RunDirectory(folder)
    config = JobConfig(name="test", parallel=ParallelConfig(data=2, collective_timeout_s=timeout_s))
    with Supervisor(run.logs) as supervisor:
        run_trainer(Job(replace(config, platform="cpu"), run, supervisor, backend=Ranks(folder, how)), "any.train")
    return run


def test_hang_is_found_and_the_stacks_of_all_ranks_are_written(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match=r"no trainer rank has made progress for 6 s .*; stacks: .*stacks$"):
        train(tmp_path, "hangs")
    for rank in range(2):
        assert "in waits_for_its_peer" in (tmp_path / "heartbeats" / f"rank_{rank}.stacks").read_text()


@pytest.mark.slow_campaign  # it waits for an answer
def test_rank_that_cannot_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match="; rank 1 wrote no stacks"):
        train(tmp_path, "stopped")
    assert "in waits_for_its_peer" in (tmp_path / "heartbeats" / "rank_0.stacks").read_text()


def test_ranks_that_work_are_not_ended(tmp_path: Path) -> None:
    assert (train(tmp_path, "ends", timeout_s=120.0).heartbeats / "rank_1").exists()
