"""Results of a study: one row per evaluation and level, read from the files that runs leave."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.studies.runs import StudyRun
from arpo_megatron.utils.atomic import read_json

if TYPE_CHECKING:
    import pandas as pd

ALL = "all"
"""The level that holds all tasks."""
COUNTERS = ("tool_calls_executed", "tool_calls_inherited", "tool_calls_cached", "tokens_sampled")
FAILURES = ("unfinished", "evaluation_calls", "calls_failed")


def collect(runs: Sequence[StudyRun]) -> "pd.DataFrame":
    """Return the evaluations of the finished runs.

    Returns:
        one row per evaluation and level. Columns:

        - arm, seed, step
        - level: "all", or the last part of the tasks' ids, e.g. "hops2"
        - tasks: number of held-out tasks
        - unfinished: tasks without a finished trajectory because the engine or the tool service failed
        - evaluation_calls, calls_failed: tool calls of the whole evaluation, and those whose status is not "ok"
        - `COUNTERS`: sums over the training steps so far, without evaluations
        - reward, success: mean reward and share of solved tasks among the finished ones; NaN without one
    """
    import pandas as pd

    rows = [row for run in runs if run.done for row in _run_rows(run)]
    return pd.DataFrame(
        rows, columns=["arm", "seed", "step", "level", "tasks", *FAILURES, *COUNTERS, "reward", "success"]
    )


def _run_rows(run: StudyRun) -> list[dict[str, Any]]:
    paths = sorted(run.directory.held_out.glob("step_*.json"))
    return [{"arm": run.arm, "seed": run.seed, **row} for path in paths for row in _file_rows(path)]


def _file_rows(path: Path) -> list[dict[str, Any]]:
    found = read_json(path, "delete its run directory, and the study repeats the run")
    levels: dict[str, list[str]] = {ALL: list(found["solved"])}
    for task in found["solved"]:
        levels.setdefault(task.rpartition("-")[2], []).append(task)
    counters = {name: int(found["totals"].get(name, 0)) for name in COUNTERS}
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
                **counters,
                "reward": _mean([found["rewards"][task] for task in finished]),
                "success": _mean([float(found["solved"][task]) for task in finished]),
            }
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
