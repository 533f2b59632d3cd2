"""The names of checkpoint directories: which there are, and which are kept."""

import re
from collections.abc import Sequence
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")
COLD_START_KEPT = 2
"""Newest checkpoints of a cold start that are kept; the ARPO loop has `train.keep_checkpoints`."""


def step_of(path: Path) -> int | None:
    """N of `step_N`; None for any other name (a save under way, a damaged one that was set aside)."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoint_directories(root: Path) -> list[Path]:
    """The checkpoints at `root` in the order of their steps."""
    steps = {step: path for path in root.iterdir() if (step := step_of(path)) is not None} if root.is_dir() else {}
    return [steps[step] for step in sorted(steps)]


def resume_from(root: Path) -> str:
    """For the end of an error message: how a run whose checkpoints are at `root` goes on, and from where."""
    there = checkpoint_directories(root)
    return f"make room and go on with --resume, from {there[-1].name if there else 'the beginning'}"


def kept(paths: Sequence[Path], keep: int, keep_every: int) -> set[Path]:
    """The `keep` newest, and those of every n-th step for n = `keep_every` (0: none of these).

    Args:
        paths: in the order of their steps.
        keep: at least 1.
        keep_every: at least 0.
    """
    milestones = {path for path in paths if keep_every and not (step_of(path) or 0) % keep_every}
    return milestones | set(paths[-keep:])
