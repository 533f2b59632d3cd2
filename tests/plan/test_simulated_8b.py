"""Admission and priority at the costs of an 8B model, by the model of rollouts. docs/reference/performance.md has them.

No time was measured on a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np
import pytest

from arpo_megatron.plan.simulate import RolloutModel, SimulatedRollout, simulate
from arpo_megatron.plan.simulated_engine import EngineModel
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.rollout import admission as admission_rules

pytestmark = pytest.mark.slow_campaign

SHORT = Mix(samples=8, initial=4, calls=6, prompt=800, segment=(500, 1300), result=(800, 2200))
LONG = Mix(samples=8, initial=4, calls=6, prompt=8000, segment=(150, 400), result=(600, 1500))
ROWS = {
    "1 s": (SHORT, 16_000, 1.0),
    "8 s": (SHORT, 16_000, 8.0),
    "30 s": (SHORT, 16_000, 30.0),
    "2 s": (LONG, 24_000, 2.0),
}
"""By the mean seconds of a tool call: trees, most tokens of a response, and the seconds."""
EIGHT_B = EngineModel(
    tokens=340_000, requests=256, step_s=0.0065, context_s=147_456 / 2.6e12, prefill_s=1 / 30_000, batch_s=0.012
)
"""An 8B model on one H100. The KV of a token has 147,456 bytes."""
TREES = 32
DRAWS = range(0, 8000, 1000)
"""Seeds of trees and latencies: one draw is not enough if tools are slow."""
SHARES = (0.5, 0.6, 0.7, 0.8, 1.0)


def run(
    row: str,
    draw: int,
    admission: Literal["kv", "all"],
    priority: Literal["none", "age"] = "none",
    engine: EngineModel = EIGHT_B,
) -> SimulatedRollout:
    mix, limit, mean_s = ROWS[row]

    def tool_s(tree: int, segment: int) -> float:
        return mean_s * math.exp(float(np.random.default_rng((draw, tree, segment)).normal()) - 0.5)

    trees = tuple(mix.tree(draw + number, 64) for number in range(TREES))
    return simulate(RolloutModel(engine, trees, TREES, tool_s, limit, mix.initial, 20, admission, priority))


def speed(base: Sequence[SimulatedRollout], found: Sequence[SimulatedRollout]) -> tuple[float, str]:
    """Return the geometric mean of the speeds relative to `base`, and a text with their range."""
    each = [one.seconds / other.seconds for one, other in zip(base, found, strict=True)]
    mean = math.exp(sum(map(math.log, each)) / len(each))
    return mean, f"speed {mean:.3f} ({min(each):.3f} to {max(each):.3f})"


def reprefill(found: Sequence[SimulatedRollout]) -> float:
    return sum(each.reprefill for each in found) / len(found)


@pytest.mark.parametrize(
    ("row", "held_speed", "held_reprefill", "aged_speed", "aged_reprefill"),
    [
        ("1 s", 1.15, 1.5, 1.2, 2.4),
        ("8 s", 1.05, 1.7, 1.05, 4.0),
        ("30 s", 0.9, 5.0, 0.9, 5.0),
        ("2 s", 1.55, 1.1, 1.5, 1.9),
    ],
)
def test_admission_and_priority_gain(
    row: str, held_speed: float, held_reprefill: float, aged_speed: float, aged_reprefill: float
) -> None:
    free, held, aged, both = (
        [run(row, draw, admission, priority) for draw in DRAWS]
        for admission, priority in (("all", "none"), ("kv", "none"), ("all", "age"), ("kv", "age"))
    )
    unlimited = [run(row, draw, "all", engine=replace(EIGHT_B, tokens=10**8)) for draw in DRAWS]
    found = {"all": free, "kv": held, "all by age": aged, "kv by age": both, "without a limit": unlimited}
    for name, each in found.items():
        print(f"{row}, {name}: {speed(free, each)[1]}, re-prefill {reprefill(each):.2f}")
    assert speed(free, held)[0] > held_speed
    assert reprefill(held) < held_reprefill
    assert speed(free, aged)[0] > aged_speed
    assert reprefill(aged) < aged_reprefill
    assert 0.97 < speed(held, both)[0] < 1.03


def test_no_other_share_of_a_paths_growth_is_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(share: float) -> dict[str, list[SimulatedRollout]]:
        monkeypatch.setattr(admission_rules, "_STILL_GROWS", share)
        return {row: [run(row, draw, "kv") for draw in DRAWS] for row in ROWS}

    base = results(admission_rules._STILL_GROWS)
    for share in SHARES:
        found = results(share)
        mean, text = speed([*chain(*base.values())], [*chain(*found.values())])
        print(f"{share}: {text}; re-prefill", ", ".join(f"{row} {reprefill(each):.2f}" for row, each in found.items()))
        assert mean < 1.02
