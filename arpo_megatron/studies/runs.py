"""Runs of a study: one cold start per seed, and one training run per arm and seed that starts from it.

Each one is an ordinary run directory of `arpo sft` or `arpo train`, so it resumes like one.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.studies.designs import RECIPE, Design, arm_recipe


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One training of a study: arm, seed, config and directory."""

    arm: str
    """Arm of the design; empty for a cold start."""
    seed: int
    recipe: str
    """Recipe with its variant."""
    overrides: tuple[str, ...]
    """Config overrides, `section.key=value`."""
    directory: RunDirectory
    config: JobConfig
    """Config that recipe and overrides resolve to."""
    sft_run: "StudyRun | None" = None
    """The run whose export this one trains; None for a cold start."""

    @classmethod
    def create(
        cls, arm: str, seed: int, path: Path, overrides: Sequence[str], sft_run: "StudyRun | None" = None
    ) -> Self:
        """Resolve the config of a run in the directory `path`.

        Raises:
            UserError: an override is not valid.
        """
        recipe = arm_recipe(arm) if arm else RECIPE
        own = (*overrides, f"seed={seed}", f"run_dir={path}")
        if sft_run is not None:
            own += (f"model.path={sft_run.directory.sft_model}", "sft.steps=0")
        return cls(arm, seed, recipe, own, RunDirectory(path), resolve.resolve(recipe, overrides=own), sft_run)

    @property
    def name(self) -> str:
        """Name in progress messages and of the log."""
        return f"{self.arm or 'cold start'} seed {self.seed}"

    @property
    def started(self) -> bool:
        """Whether an earlier process has started this run."""
        return self.directory.config.exists()

    @property
    def done(self) -> bool:
        """Whether the run has finished all its steps."""
        if self.sft_run is None:
            return self.directory.sft_done
        return self.directory.steps_done >= self.config.train.steps

    @property
    def command(self) -> list[str]:
        """Command line that starts or resumes the run."""
        verb = "sft" if self.sft_run is None else "train"
        resume = ["--resume"] if self.started else []
        return [sys.executable, "-m", "arpo_megatron", verb, self.recipe, *self.overrides, *resume]


def plan_runs(design: Design, out: Path, seeds: int, overrides: Sequence[str]) -> list[StudyRun]:
    """Plan the training runs of a study, seed by seed.

    Args:
        design: the study.
        out: directory of the study.
        seeds: number of seeds, counted from 1.
        overrides: config overrides of every run, `section.key=value`.

    Raises:
        UserError: an override is not valid.
    """
    runs = []
    for seed in range(1, seeds + 1):
        start = StudyRun.create("", seed, out / "sft" / f"seed{seed}", overrides)
        for arm in design.arms:
            runs.append(StudyRun.create(arm, seed, out / "runs" / f"{arm}-seed{seed}", overrides, start))
    return runs


def check_runs(runs: Sequence[StudyRun]) -> None:
    """Check every config before any process starts.

    Raises:
        UserError: evaluations are switched off, or a run was started with another config.
    """
    for run in runs:
        for each in (run.sft_run, run):
            if each is not None and each.started:
                choose_run.existing(each.config)
        if not (run.config.evaluation.before and run.config.evaluation.after):
            raise UserError(
                "a study needs evaluation.before=true and evaluation.after=true for both ends of its curves"
            )
