"""The pieces of a study: a cold start for each seed, then a run for each arm and seed that begins with its export.

A piece is a run directory of its own, made by `arpo sft` or `arpo train`; what those promise about resuming holds here.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, run_directory
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.studies.designs import RECIPE, Design, recipe_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A process of a study.

    Attributes:
        name: for people and for its log.
        verb: "sft" or "train".
        recipe: with its variant.
        overrides: its other overrides, `section.key=value`.
        run: its directory.
        config: what all of that comes to.
        needs: the piece whose model it begins with; None: the recipe's.
    """

    name: str
    verb: str
    recipe: str
    overrides: tuple[str, ...]
    run: RunDirectory
    config: JobConfig
    needs: "Piece | None" = None

    @classmethod
    def of(
        cls, name: str, verb: str, recipe: str, overrides: Sequence[str], path: Path, needs: "Piece | None" = None
    ) -> Self:
        """A piece in the directory `path`. Raises UserError for overrides that cannot work."""
        all_overrides = (*overrides, f"run_dir={path}")
        return cls(
            name,
            verb,
            recipe,
            all_overrides,
            RunDirectory(path),
            resolve.resolve(recipe, overrides=all_overrides),
            needs,
        )

    @property
    def begun(self) -> bool:
        """Whether it has been started before."""
        return self.run.config.exists()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        if self.verb == "sft":
            return self.run.sft_done
        return self.run.result.exists() and json.loads(self.run.result.read_text())["step"] >= self.config.train.steps

    @property
    def command(self) -> list[str]:
        """The process that does it, or goes on with it."""
        resume = ["--resume"] if self.begun else []
        return [sys.executable, "-m", "arpo_megatron", self.verb, self.recipe, *self.overrides, *resume]


@dataclass(frozen=True, slots=True)
class ArmRun:
    """The run of an arm with a seed."""

    arm: str
    seed: int
    piece: Piece


def plan(design: Design, out: Path, seeds: int, overrides: Sequence[str]) -> list[ArmRun]:
    """The runs of a study, seed by seed; each `piece.needs` its seed's cold start.

    Args:
        design: which arms.
        out: directory of the study.
        seeds: their number; they count from 1.
        overrides: of every piece, `section.key=value`.

    Raises:
        UserError: a word cannot work.
    """
    runs = []
    for seed in range(1, seeds + 1):
        common = (*overrides, f"seed={seed}")
        start = Piece.of(f"cold start seed {seed}", "sft", RECIPE, common, out / "sft" / f"seed{seed}")
        begin = (*common, f"model.path={start.run.sft_model}", "sft.steps=0")
        for arm in design.arms:
            path = out / "runs" / f"{arm}-seed{seed}"
            runs.append(ArmRun(arm, seed, Piece.of(f"{arm} seed {seed}", "train", recipe_of(arm), begin, path, start)))
    return runs


def check(runs: Sequence[ArmRun]) -> None:
    """Look at every config before anything is started.

    Raises:
        UserError: evaluations are missing, or a run was started with other overrides.
    """
    for run in runs:
        for piece in (run.piece.needs, run.piece):
            if piece is None:
                continue
            if piece.begun:
                run_directory.existing(piece.config)
        wanted = run.piece.config.evaluation
        if not (wanted.before and wanted.after):
            raise UserError("a study needs evaluation.before=true and evaluation.after=true: its curves begin and end")
