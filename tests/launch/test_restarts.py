"""A job whose process dies is resumed as often as `--restarts` allows."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.backend import LocalBackend
from arpo_megatron.launch.job import run_with_restarts
from arpo_megatron.launch.services import Job, run_trainer
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.processes import ProcessDiedError


class FailsTwice(LocalBackend):
    """Ranks that a signal kills at their first two starts."""

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        run = arguments[0]
        return ["sh", "-c", f"echo start >> {run}/starts; [ $(wc -l < {run}/starts) -gt 2 ] || kill -9 $$"], {}


def train(path: Path, restarts: int) -> tuple[str, str]:
    """Run the job; return the starts of its ranks and its events."""
    run = RunDirectory(path)
    with Supervisor(run.logs) as supervisor:
        job = Job(JobConfig(name="test"), run, supervisor, backend=FailsTwice())
        try:
            run_with_restarts(job, lambda job: run_trainer(job, "any.train"), restarts)
        finally:
            text = (path / "starts").read_text(), run.events.read_text() if run.events.exists() else ""
    return text


def test_killed_job_is_resumed_until_it_ends(tmp_path: Path) -> None:
    starts, events = train(tmp_path, restarts=2)
    assert starts.count("start") == 3
    assert events.count("train was killed by SIGKILL") == 2
    assert "restart 1 of 2" in events and "restart 2 of 2" in events


@pytest.mark.parametrize("restarts", [0, 1])
def test_job_that_dies_too_often_fails_with_its_cause(tmp_path: Path, restarts: int) -> None:
    with pytest.raises(ProcessDiedError, match="train was killed by SIGKILL"):
        train(tmp_path, restarts)
    assert (tmp_path / "starts").read_text().count("start") == restarts + 1
