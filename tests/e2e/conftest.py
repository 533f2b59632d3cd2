"""A short demo and a cold start, each made once for all end-to-end tests."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ARPO, SEED, SHORT_SFT, Job, Start, quickstart, run_to_end

Once = Callable[[str, Callable[[Path], None]], Path]


def run_demo(directory: Path, *overrides: str, arpo: Sequence[str] = ARPO) -> dict[str, Any]:
    """Run `arpo demo` in an empty directory. Returns its figures, with absolute paths, and its terminal output."""
    command = [*arpo, "demo", "--seed", str(SEED), *overrides]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"arpo demo failed; logs in {directory}/runs/*/logs\n{done.stderr[-3000:]}"
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    figures["screen"] = done.stderr
    for name in ("run_dir", "export_dir"):
        figures[name] = str(directory / figures[name])
    return figures


@pytest.fixture(scope="session")
def sft_run(once: Once) -> Path:
    """A run directory with a finished cold start."""

    def build(path: Path) -> None:
        run_to_end(quickstart("sft", path / "run", *SHORT_SFT), path / "run")

    return once("sft_run", build) / "run"


@pytest.fixture
def warm_run(sft_run: Path, tmp_path: Path) -> Path:
    """A run directory whose cold start is done, so that `arpo train` begins with the ARPO loop."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("initial_model", "sft"):
        shutil.copytree(sft_run / name, run / name)
    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start jobs in the background. A job that a failing test leaves is killed, and its processes end with it."""
    jobs: list[Job] = []

    def start_job(command: list[str]) -> Job:
        jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()
        job.wait()
