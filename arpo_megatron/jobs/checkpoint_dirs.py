"""Names of checkpoint directories: list them, and choose which to keep."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")
SFT_CHECKPOINTS_KEPT = 2
"""Number of newest cold-start checkpoints to keep. The ARPO loop has `train.keep_checkpoints`."""


def step_of(path: Path) -> int | None:
    """Return N of `step_N`, or None for other names (a save in progress, a damaged checkpoint that was set aside)."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoint_directories(root: Path) -> list[Path]:
    """Return the checkpoints in `root` in the order of their steps."""
    steps = {step: path for path in root.iterdir() if (step := step_of(path)) is not None} if root.is_dir() else {}
    return [steps[step] for step in sorted(steps)]


def disk_full_hint(root: Path) -> str:
    """Return the end of an error message about a full disk: how to resume the run with checkpoints in `root`."""
    paths = checkpoint_directories(root)
    return f"free disk space, then resume with --resume (from {paths[-1].name if paths else 'the beginning'})"


def best_checkpoints(paths: Sequence[Path], held_out: Path, count: int) -> set[Path]:
    """Return the `count` checkpoints with the highest held-out success; of equal ones the newer.

    Args:
        paths: checkpoints in the order of their steps.
        held_out: directory with the results of the held-out evaluations.
        count: number of checkpoints; fewer are returned if fewer were evaluated.
    """
    scores: dict[Path, float] = {}
    for path in paths if count else ():
        with suppress(OSError, ValueError, KeyError):  # this step was not evaluated
            result = json.loads((held_out / f"step_{step_of(path):06d}.json").read_text(encoding="utf-8"))
            scores[path] = float(result["success"])
    ranked = sorted(scores, key=lambda path: (scores[path], step_of(path) or 0), reverse=True)
    return set(ranked[:count])


def kept(paths: Sequence[Path], keep: int, keep_every: int) -> set[Path]:
    """Return the `keep` newest checkpoints and those of every `keep_every`-th step.

    Args:
        paths: checkpoints in the order of their steps.
        keep: number of newest checkpoints, at least 1.
        keep_every: interval of steps; 0 keeps no others.
    """
    milestones = {path for path in paths if keep_every and not (step_of(path) or 0) % keep_every}
    return milestones | set(paths[-keep:])
