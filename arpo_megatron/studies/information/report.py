"""Figures of the study with bootstrap intervals over trees, and its page."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arpo_megatron.algorithms.types import Floats
from arpo_megatron.errors import UserError
from arpo_megatron.studies.information.samples import CREDITS, TreeSample
from arpo_megatron.studies.information.sampling import ARMS, DIRECTION, GRPO, INFO, read_direction, read_samples
from arpo_megatron.utils.text import markdown

SMALLER = (4, 6, 8)
"""Sizes of GRPO's groups that are made from disjoint parts of its 16 trajectories."""
RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)
_FEWEST = 16
"""Trees below which an arm is not shown."""
_CLAIM = 2.0
"""The paper's claim as a ratio: equal success for half the tool calls."""
_POWER = 1.960 + 1.282
"""Sum of the normal quantiles of a two-sided test at 5 % and of a power of 90 %."""


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Information per call of an arm, and its resamples."""

    trees: int
    calls: float
    """Mean calls per group."""
    noise: float
    """Mean of g.u over its standard error, with the groups of a tree as one observation: the claim needs about 10."""
    information: float
    resampled: Floats
    """float64[RESAMPLES]."""


def figures(groups: Sequence[Sequence[tuple[float, int]]], *, seed: int = 0) -> ArmFigures:
    """Estimate E[g.u]^2 / (Var(g.u) E[calls]) from the (g.u, calls) of the groups of each tree.

    Groups of one tree (subsamples of its trajectories) share a task, so whole trees are resampled.
    """
    sums = np.array([[len(own), *np.sum([(g, g * g, calls) for g, calls in own], axis=0)] for own in groups])
    draws = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)
    number, total, squares, calls = sums.sum(0)
    mean = total / number
    deviation = math.sqrt(max(squares / number - mean**2, 0.0))
    noise = math.inf if deviation == 0 else mean / deviation * math.sqrt(len(sums))
    return ArmFigures(len(sums), calls / number, noise, float(_information(sums.sum(0))), _information(draws @ sums))


def _information(sums: Floats) -> Floats:
    number, total, squares, calls = np.moveaxis(sums, -1, 0)
    mean = total / number
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample of few trees may have no spread
        return np.asarray(mean**2 / (squares / number - mean**2) / (calls / number))


def ratio(arm: ArmFigures, control: ArmFigures) -> tuple[float, float, float]:
    """Return the ratio of the information per call and its 95 % interval; the arms' trees are independent."""
    low, high = np.quantile(arm.resampled / control.resampled, _QUANTILES)
    return arm.information / control.information, float(low), float(high)


def trees_needed(arm: ArmFigures, control: ArmFigures) -> int:
    """Return the trees per arm with which a ratio of 2 is distinguished from 1 in 90 of 100 studies."""
    deviation = float(np.std(np.log(arm.resampled / control.resampled), ddof=1))
    return math.ceil(min(arm.trees, control.trees) * (_POWER * deviation / math.log(_CLAIM)) ** 2)


def arm_figures(samples: Mapping[str, Sequence[TreeSample]], credit: str) -> dict[str, ArmFigures]:
    """Return the figures of each arm, and of GRPO with smaller groups, whose trees are resampled together."""
    rows = {}
    for number, (arm, trees) in enumerate(samples.items()):
        rows[arm] = figures([tree.gradients(credit) for tree in trees], seed=number)
        for size in SMALLER if arm == GRPO else ():
            rows[f"{GRPO}, M {size}"] = figures([tree.gradients(credit, size) for tree in trees], seed=number)
    return rows


def render(studies: Sequence[Path], made_by: str) -> str:
    """Return the page of finished or unfinished studies in Markdown. Raises UserError for one without GRPO's trees."""
    sections = [
        "# information",
        "Information of one tree about the gradient, per tool call: E[g.u]^2 / (Var(g.u) E[calls]), where g is the "
        "gradient of a tree and u that of an independent GRPO sample. A call is an answer of a tool in the tree; calls "
        "that forks share count once. `ratio` compares with GRPO of 16 trajectories, with the 95 % interval of "
        f"{RESAMPLES:,} bootstrap resamples of trees. `mean / error` is E[g.u] over its standard error, with the "
        "groups of a tree as one observation. `trees for 2` is the number of trees per arm with which a ratio of 2 "
        "(the paper's claim: half the calls) would be distinguished from 1 in 90 of 100 studies, from this sample's "
        "spread.",
    ]
    for path in studies:
        sections += _section(path)
    return "\n\n".join([*sections, made_by]) + "\n"


def _section(path: Path) -> list[str]:
    read = {arm: read_samples(path / f"{arm}.jsonl") for arm in ARMS}
    samples = {arm: trees for arm, (trees, _) in read.items() if len(trees) >= _FEWEST}
    if GRPO not in samples:
        raise UserError(
            f"{path} has fewer than {_FEWEST} trees of {GRPO}: run `arpo study information --out {path}` longer"
        )
    halves, reference = read_direction(path / DIRECTION)
    cosine = float(halves[0] @ halves[1] / np.linalg.norm(halves[0]) / np.linalg.norm(halves[1]))
    failed = sum(count for _, count in read.values())
    success = float(np.mean([reward > 0.5 for tree in samples[GRPO] for reward in tree.rewards]))
    by_credit = {credit: arm_figures(samples, credit) for credit in CREDITS}
    rows = []
    for arm, own in by_credit[CREDITS[0]].items():
        control = by_credit[CREDITS[0]][GRPO]
        cells = [arm, f"{own.trees:,}", f"{own.calls:.1f}", f"{own.noise:.1f}", f"{1e3 * own.information:.3f}"]
        ratios = [_ratio(arm, by_credit[credit]) for credit in CREDITS]
        rows.append([*cells, *ratios, "" if arm == GRPO else f"{trees_needed(own, control):,}"])
    head = ["arm", "trees", "calls", "mean / error", "information x 1000", *(f"ratio ({name})" for name in CREDITS)]
    return [
        f"## {path.name}",
        f"{json.loads((path / INFO).read_text(encoding='utf-8'))['command']}",
        f"Success {success:.1%}. The reference has {reference:,} trees; the cosine of its two halves is {cosine:.2f}. "
        f"{failed} trees could not be finished.",
        markdown([*head, "trees for 2"], rows),
    ]


def _ratio(arm: str, rows: Mapping[str, ArmFigures]) -> str:
    value, low, high = ratio(rows[arm], rows[GRPO])
    return "1" if arm == GRPO else f"{value:.2f} ({low:.2f} to {high:.2f})"
