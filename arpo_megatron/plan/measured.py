"""Seconds of a run's steps by phase, to be read next to those of a plan."""

from statistics import mean

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.json_lines import json_lines

PREFIX = "seconds/"


def measured_seconds(run: RunDirectory, *, sft: bool) -> dict[str, float]:
    """Return the mean seconds of each phase of a run's steps, without the first one, which compiles kernels.

    A phase that a step does not have, a save for example, counts as 0 there, as in a plan.

    Args:
        run: the run.
        sft: take the updates of its cold start.

    Raises:
        UserError: fewer than two steps have metrics.
    """
    file = run.path / "sft_metrics.jsonl" if sft else run.metrics
    lines = json_lines(file.read_bytes()) if file.exists() else ()
    rows = [row for _, row in lines if row is not None][1:]
    if not rows:
        raise UserError(f"{file} has no step after the first one, so nothing can be compared with the plan")
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(PREFIX))
    return {name.removeprefix(PREFIX): mean(row.get(name) or 0.0 for row in rows) for name in names}
