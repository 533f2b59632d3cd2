"""A job that is asked to end is stopped only if something is left to do.

Ranks and services are stood in for: a real export of a small model is over before it can be asked to end in its middle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import StoppedError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch import job
from arpo_megatron.launch.backend import LocalBackend
from arpo_megatron.launch.services import Job, run_trainer
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.atomic import write_json

WORDS = ["platform=cpu", "sft.steps=2", "train.steps=3"]


class Ranks(LocalBackend):
    """Processes that are asked to end in `asked_in`, which exports all the same, or has saved and ends."""

    def __init__(self, run: RunDirectory, asked_in: str, *, exports: bool) -> None:
        super().__init__()
        self.run, self.asked_in, self.exports = run, asked_in, exports
        self.ran: list[str] = []

    def ranks(self, module: str, arguments: Sequence[str], config: JobConfig) -> tuple[list[str], dict[str, str]]:
        self.ran.append(name := module.rpartition(".")[2])
        model, result = self.run.sft_model, self.run.result
        export = f"mkdir {model}; echo '{{}}' > {model}/config.json"
        if name == "train":
            export = f"echo '{{\"step\": {config.train.steps}}}' > {result}"
        asked = f"touch {self.run.stop}" if name == self.asked_in else "true"
        return ["sh", "-c", f"{asked}; {export if self.exports or name != self.asked_in else 'true'}"], {}

    @contextmanager
    def services(self, *_: object, **_options: object) -> Iterator[SimpleNamespace]:
        self.ran.append("services")
        yield SimpleNamespace(environment={})

    def train(self, *overrides: str) -> None:
        with self.job(*overrides) as held, pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "running_services", self.services)
            job.run_training_phases(held)

    @contextmanager
    def job(self, *overrides: str) -> Iterator[Job]:
        config = resolve.resolve("quickstart", overrides=[*WORDS, *overrides])
        with Supervisor(self.run.logs) as supervisor:
            yield Job(config, self.run, supervisor, backend=self)


def test_job_stopped_during_its_export_is_done(tmp_path: Path) -> None:
    ranks = Ranks(RunDirectory(tmp_path), "train", exports=True)
    ranks.train()
    assert ranks.ran == ["sft", "services", "train"]


def test_stopped_job_is_not_done_after_a_longer_training_was_asked_for(tmp_path: Path) -> None:
    ranks = Ranks(RunDirectory(tmp_path), "train", exports=False)
    with pytest.raises(StoppedError):
        ranks.train()
    ranks.run.stop.unlink()
    write_json(ranks.run.result, {"step": 3})
    with pytest.raises(StoppedError):
        ranks.train("train.steps=4")
    assert ranks.ran == ["sft", *["services", "train"] * 2]


@pytest.mark.parametrize("exports", [True, False])
def test_no_engine_starts_after_a_stopped_sft(tmp_path: Path, exports: bool) -> None:
    ranks = Ranks(RunDirectory(tmp_path), "sft", exports=exports)
    with pytest.raises(StoppedError):
        ranks.train()
    assert ranks.ran == ["sft"]


def test_sft_stopped_during_its_export_is_done(tmp_path: Path) -> None:
    ranks = Ranks(RunDirectory(tmp_path), "sft", exports=True)
    with ranks.job() as held:
        job.run_sft_phase(held)


def test_stop_file_of_a_killed_job_does_not_stop_an_export(tmp_path: Path) -> None:
    ranks = Ranks(RunDirectory(tmp_path), "", exports=True)
    ranks.run.stop.touch()
    with ranks.job() as held:
        run_trainer(held, "arpo_megatron.trainer.export_checkpoint")
    assert ranks.ran == ["export_checkpoint"]
