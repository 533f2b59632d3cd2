"""Recipes are nemo-run's too: factories from Python, and jobs from its own command line."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

pytest.importorskip("nemo_run", reason="nemo-run is not installed (the `slurm` extra)")
ROOT = Path(__file__).resolve().parents[2]


def test_a_factory_makes_the_recipes_job_and_its_values_can_be_changed() -> None:
    import fiddle

    from arpo_megatron.cli.nemo import factories

    assert list(factories) == resolve.recipe_names()
    for name, factory in factories.items():
        assert fiddle.build(factory()) == resolve.resolve(name)
    job = factories["deepsearch_14b"](variants="4nodes+fp8")
    job.train.steps = 3
    built = fiddle.build(job)
    assert built == resolve.resolve("deepsearch_14b+4nodes+fp8", overrides=["train.steps=3"])
    job.train.steps = -3
    with pytest.raises(ValueError, match="greater than 0"):
        fiddle.build(job)


def test_a_method_is_laid_by_the_factory_and_is_not_a_name_to_be_changed() -> None:
    import fiddle

    from arpo_megatron.cli.nemo import factories

    for recipe, preset in (("quickstart", "grpo"), ("reasoning_7b", "dapo")):
        laid = resolve.resolve(recipe, overrides=[f"algorithm.name={preset}"])
        job = factories[recipe](preset=preset)
        assert fiddle.build(job) == laid
        job.algorithm.clip_high = 0.3
        assert fiddle.build(job) == resolve.with_overrides(laid, ["algorithm.clip_high=0.3"])
        job = factories[recipe]()
        job.algorithm.name = preset
        with pytest.raises(UserError, match=rf"the method as it is \(arpo\): .* job=RECIPE\(preset='{preset}'\)"):
            fiddle.build(job)


def test_what_is_built_is_checked_as_the_command_line_checks_it() -> None:
    import fiddle

    from arpo_megatron.cli import nemo

    job = nemo.factories["quickstart"]()
    job.reward.terms = {"bogus": 1.0}
    with pytest.raises(UserError, match="bogus"):
        fiddle.build(job)
    job = nemo.factories["quickstart"]()
    job.algorithm.loss = "bogus"
    with pytest.raises(UserError, match="unknown loss 'bogus'; known: "):
        fiddle.build(job)
    by_hand = replace(resolve.resolve("quickstart"), algorithm=AlgorithmConfig(loss="bogus"))
    for run_it in (nemo.train, nemo.sft):  # a job may come from no factory
        with pytest.raises(UserError, match="unknown loss 'bogus'"):
            run_it(by_hand)


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


def test_a_method_that_is_only_named_there_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    # Without its model it could not train anyhow.
    words = ["job=quickstart", "job.algorithm.name=grpo", "job.model.path=/none"]
    done = nemorun("train", "--yes", *words, environment=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "make the recipe with it, job=RECIPE(preset='grpo')" in done.stdout + done.stderr
    assert not list(tmp_path.glob("runs"))
    done = nemorun("train", "--dryrun", "job=quickstart(preset='grpo')", environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "branching='grpo'" in done.stdout
