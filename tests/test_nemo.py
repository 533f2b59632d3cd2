"""Recipes are nemo-run's too: factories from Python, and jobs from its own command line."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from arpo_megatron import resolve

pytest.importorskip("nemo_run", reason="nemo-run is not installed (the `slurm` extra)")
ROOT = Path(__file__).resolve().parent.parent


def test_a_factory_makes_the_recipes_job_and_its_values_can_be_changed() -> None:
    import fiddle

    from arpo_megatron.nemo import factories

    assert list(factories) == resolve.recipe_names()
    for name, factory in factories.items():
        assert fiddle.build(factory()) == resolve.resolve(name)
    job = factories["deepsearch_14b"](variants="4nodes+fp8")
    job.train.steps = 3
    built = fiddle.build(job)
    assert built == resolve.resolve("deepsearch_14b+4nodes+fp8", words=["train.steps=3"])
    job.train.steps = -3
    with pytest.raises(ValueError, match="greater than 0"):
        fiddle.build(job)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which the entry points of pyproject.toml are installed, as `pip install .` would."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "installed" / "arpo_megatron_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arpo-megatron-here\nVersion: 0\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{info.parent}",
        "COLUMNS": "200",
        "NEMORUN_HOME": str(tmp_path / "nemo"),
    }


def nemorun(*words: str, environment: dict[str, str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from nemo_run.__main__ import app; app()", "arpo", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


def test_nemo_runs_command_line_takes_recipes_variants_and_overrides(
    environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["job=deepsearch_14b(variants='4nodes+fp8')", "job.model.path=/models/14b", "job.optimizer.lr=2e-6"]
    done = nemorun("train", "--dryrun", *words, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("PosixPath('/models/14b')", "fp8='blockwise'", "data=8", "lr=2e-06", "hub_id='Qwen/Qwen3-14B'"):
        assert said in done.stdout
    assert not list(tmp_path.glob("runs"))


def test_a_job_that_cannot_start_says_why_there_too(environment: dict[str, str], tmp_path: Path) -> None:
    done = nemorun("train", "--yes", "job=deepsearch_14b", environment=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.path is missing: fetch Qwen/Qwen3-14B" in done.stdout + done.stderr
