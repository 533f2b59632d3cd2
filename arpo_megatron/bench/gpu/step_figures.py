"""The figures of a run's steps beside the planner's: seconds by phase, peaks of memory, what the trees were."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from arpo_megatron.bench.gpu.journal import Figures
from arpo_megatron.bench.gpu.trainer import PASSES, TIME_GOAL, beside, gib
from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.plan.memory import STATIC, Memory
from arpo_megatron.plan.workload import typical

PHASES: Mapping[str, Sequence[str]] = {
    "rollout": ("prefill", "decode", "tools"),
    "logprobs": ("old_logprobs",),
    "update": ("forward_backward", "gradient_reduction", "optimizer"),
    "push": ("weight_push",),
}
"""Phase of a step as the run times it -> what the planner has in it. Lending memory is a part of the push there."""
TRAINING = ("logprobs", "ratios", "update")
"""Phases in which the trainer has the engine's memory."""


@dataclass(slots=True)
class Watched:
    """What was seen of a run.

    Attributes:
        rows: metrics of its steps.
        used: most bytes of the device in use in each phase, of all processes but this one, looked at every 0.1 s.
        startup_s: seconds until the first trees began to grow.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    used: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    startup_s: float = 0.0


def seconds_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Of a step, by phase."""
    return {key.removeprefix("seconds/"): value for key, value in row.items() if key.startswith("seconds/")}


def times_of(rows: Sequence[Mapping[str, Any]], ahead: Mapping[str, float], these: Mapping[str, float]) -> Figures:
    """Median seconds of each phase beside both predictions."""
    figures: Figures = {}
    seconds = [seconds_of(row) for row in rows]
    planned = {"ahead": [0.0], "these": [0.0]}
    for phase, names in PHASES.items():
        took = [each.get(phase, 0.0) + (each.get("lend", 0.0) if phase == "push" else 0.0) for each in seconds]
        before, after = (sum(phases.get(name, 0.0) for name in names) for phases in (ahead, these))
        planned["ahead"].append(before)
        planned["these"].append(after)
        figures[phase] = _twice(before, after, median(took), partial(beside, goal=TIME_GOAL))
        figures[phase]["of"] = {name: round(these.get(name, 0.0), 2) for name in names}
    whole = median(sum(each.values()) for each in seconds)
    figures["step"] = _twice(sum(planned["ahead"]), sum(planned["these"]), whole, partial(beside, goal=TIME_GOAL))
    return figures


def memory_of(watched: Watched, ahead: Memory, these: Memory) -> Figures:
    """Peaks beside both predictions: of the trainer's tensors, and of the device in both halves of a step."""
    tensors = (*STATIC, *PASSES)

    def of_device(parts: Mapping[str, float]) -> float:
        return sum(size for name, size in parts.items() if name != "reserve")

    def of_trainer(needs: Memory) -> float:
        return sum(size for name, size in needs.training.items() if name in tensors)

    training = max(watched.used[phase] for phase in TRAINING)
    peak = 1e9 * max(float(row["memory_peak_gb"]) for row in watched.rows)
    return {
        "trainer_tensors": _twice(of_trainer(ahead), of_trainer(these), peak, gib),
        "device_in_training": _twice(of_device(ahead.training), of_device(these.training), training, gib),
        "device_in_rollout": _twice(of_device(ahead.rollout), of_device(these.rollout), watched.used["rollout"], gib),
        "device_by_phase": {phase: round(used / GIB, 2) for phase, used in watched.used.items()},
        "parts": {
            "training": {name: round(size / GIB, 2) for name, size in these.training.items()},
            "rollout": {name: round(size / GIB, 2) for name, size in these.rollout.items()},
        },
    }


def _twice(before: float, after: float, measured: float, beside_it: Callable[[float, float], Figures]) -> Figures:
    """The measurement beside the plan for the trees that grew, and beside the one of before the run."""
    figures = beside_it(after, measured)
    ahead = beside_it(before, measured)
    return figures | {"planned_ahead": ahead["planned"], "ratio_ahead": ahead["ratio"]}


def work_of(rows: Sequence[Mapping[str, Any]], config: JobConfig, tools_s: float) -> Figures:
    """What the trees were, beside what the plan took them for."""
    ahead, tasks = typical(config), config.train.tasks_per_step
    sums = {name: median(float(row[name]) for row in rows) for name in ("tokens_sampled", "unique_tokens", "forks")}
    told = ("cached_prompt_share", "prefill_over_unique", "tokens_per_s", "logprob_gap", "trainer/tokens_per_s")
    last = {name: rows[-1][name] for name in (*told, "trainer/tflops", "ratio_max", "grad_norm")}
    return {
        "tokens_sampled": beside(tasks * ahead.sampled, sums["tokens_sampled"], TIME_GOAL),
        "unique_tokens": beside(tasks * ahead.unique, sums["unique_tokens"], TIME_GOAL),
        "tools_s": beside(ahead.tools_s, tools_s, TIME_GOAL),
        "forks": sums["forks"],
        **last,
    }
