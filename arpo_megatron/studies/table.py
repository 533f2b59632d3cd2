"""What the runs of a study found: a row an evaluation and level, from the files that the runs leave."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.studies.pieces import ArmRun

if TYPE_CHECKING:
    import pandas as pd

ALL = "all"
"""The level that holds all tasks."""
COUNTERS = ("tool_calls_executed", "tool_calls_inherited", "tool_calls_cached", "tokens_sampled")
TROUBLE = ("unfinished", "evaluation_calls", "calls_failed")


def collect(runs: Sequence[ArmRun]) -> "pd.DataFrame":
    """The evaluations of finished runs.

    Returns:
        columns arm, seed, step, level ("all", and what the tasks' ids end with, e.g. "hops2"), tasks, unfinished (tasks
        that could not be finished, for which no policy is to blame), evaluation_calls and calls_failed (of the whole
        evaluation; failed: the tool did not answer "ok"), `COUNTERS` (sums over the training steps until then, without
        evaluations), reward (mean) and success (share), both of finished tasks; NaN where there is none.
    """
    import pandas as pd

    rows = [row for run in runs if run.piece.done for row in _rows(run)]
    return pd.DataFrame(
        rows, columns=["arm", "seed", "step", "level", "tasks", *TROUBLE, *COUNTERS, "reward", "success"]
    )


def _rows(run: ArmRun) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(run.piece.run.held_out.glob("step_*.json")):
        rows += [{"arm": run.arm, "seed": run.seed, **row} for row in _of_file(path)]
    return rows


def _of_file(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    levels: dict[str, list[str]] = {ALL: list(found["solved"])}
    for task in found["solved"]:
        levels.setdefault(task.rpartition("-")[2], []).append(task)
    counted = {name: int(found["totals"].get(name, 0)) for name in COUNTERS}
    rows = []
    for level, tasks in sorted(levels.items()):
        finished = [task for task in tasks if task in found["rewards"]]
        rows.append(
            {
                "step": found["step"],
                "level": level,
                "tasks": len(tasks),
                "unfinished": len(tasks) - len(finished),
                "evaluation_calls": sum(found["tool_calls"].values()),
                "calls_failed": sum(count for status, count in found["tool_calls"].items() if status != "ok"),
                **counted,
                "reward": _mean([found["rewards"][task] for task in finished]),
                "success": _mean([float(found["solved"][task]) for task in finished]),
            }
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
