"""Decisions about packs as pure functions: which trees share a pack, where a large tree is cut, which rank computes it.

Costs are in query-key pairs, the unit of attention work. `CostModel` converts tokens and predictions to pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import forward_flops
from arpo_megatron.packing.layout import Span

CHAIN_STEP = 64
"""A long chain may be cut at every multiple of this many tokens from its start."""
PACK_COST_TOKENS = 512
"""Cost of one more pack, in tokens; an inherited or repeated ancestor costs one token."""
BROKEN_CHAIN_TOKENS = 16
"""Extra cost of a cut inside a chain, in tokens: the pack before it waits with its activations."""
PAIR_SLOWNESS = 3.0
"""Time of an attention FLOP over the time of any other FLOP; `arpo bench pack` measures 3.2 on two idle cores."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Model of the work of a stretch of tokens."""

    token_pairs: float
    """Work per token in the layers outside attention, in query-key pairs."""
    target_pairs: float = 0.0
    """Work per predicted token in the output head, in query-key pairs."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "CostModel":
        """Derive the costs from the FLOPs of a model; an attention FLOP takes `PAIR_SLOWNESS` times as long as
        others."""
        pair, _ = forward_flops(spec, 0, 1, 0)
        token, target = forward_flops(spec, 1, 0, 1)
        return cls(token / pair / PAIR_SLOWNESS, target / pair / PAIR_SLOWNESS)

    def cost(self, tokens: int, pairs: int, targets: int) -> float:
        """Return the work in query-key pairs."""
        return self.token_pairs * tokens + pairs + self.target_pairs * targets


TYPICAL_COST = CostModel(token_pairs=4000.0)
"""Costs of a model of medium size; a job uses `CostModel.of` its model."""


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices of `sizes` so that sums stay within `budget`; a larger item is alone, empty items are left out."""
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        group = next((g for g, room in enumerate(free) if sizes[index] <= room), None)
        if group is None:
            groups.append([index])
            free.append(budget - sizes[index])
        else:
            groups[group].append(index)
            free[group] -= sizes[index]
    return groups


def balanced_groups(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Group items into as few groups as first-fit-decreasing needs, with costs balanced greedily.

    The costliest item goes first, each to the cheapest group with room. If an item finds no room, the groups of
    first-fit-decreasing are returned.
    """
    fitted = first_fit_decreasing(sizes, budget)
    groups: list[list[int]] = [[] for _ in fitted]
    room, load = [budget] * len(fitted), [0.0] * len(fitted)
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -costs[i]):
        fits = [g for g in range(len(groups)) if sizes[index] <= room[g] or not groups[g]]
        if not fits:
            return fitted
        group = min(fits, key=lambda g: load[g])
        groups[group].append(index)
        room[group] -= sizes[index]
        load[group] += costs[index]
    return groups


def divide_work(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide items among ranks: the costliest first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


def depths(subtree_end: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the number of ancestors of each token: subtrees opened before it minus those that have ended."""
    n = len(subtree_end)
    ended = np.cumsum(np.bincount(subtree_end, minlength=n + 1))[:n]
    return np.arange(n) - ended


def allowed_cuts(subtree_end: NDArray[np.int32], step: int) -> NDArray[np.int64]:
    """Return ascending positions from 0 to n, at most `step` apart: chain boundaries and positions inside chains."""
    n = len(subtree_end)
    # A chain continues from t-1 to t if t is the only child: then both subtrees end at the same position.
    heads = (
        np.flatnonzero(np.concatenate([[True], subtree_end[1:] != subtree_end[:-1]])) if n else np.zeros(0, np.int64)
    )
    edges = np.append(heads, n)
    steps = [np.arange(low, high, step) for low, high in pairwise(edges)]
    return np.concatenate([*steps, [n]]).astype(np.int64)


def trace_spans(cuts: NDArray[np.int64], previous: NDArray[np.int64]) -> list[Span]:
    """Return the spans up to the last cut, where the span that ends at cut i begins at cut `previous[i]`."""
    spans: list[Span] = []
    i = len(cuts) - 1
    while i > 0:
        spans.append((int(cuts[previous[i]]), int(cuts[i])))
        i = int(previous[i])
    return spans[::-1]


def cut_spans(subtree_end: NDArray[np.int32], budget: int, *, inherit: bool) -> list[Span]:
    """Choose where a tree larger than the budget is cut: few packs, at positions with few ancestors.

    Args:
        subtree_end: int32[n] of a whole tree in depth-first order.
        budget: largest number of tokens that a pack computes.
        inherit: ancestors come from earlier packs; otherwise they are computed again and count. The budget is then
            raised to the longest path (a job's config refuses a smaller one). The tokens between neighbouring cuts are
            part of one chain, so with their ancestors they are part of one path and always fit.
    """
    step = max(1, min(CHAIN_STEP, budget // 2))
    cuts = allowed_cuts(subtree_end, step)
    above = depths(subtree_end)
    if not inherit:
        budget = max(budget, int(above.max(initial=0)) + 1)
    repeated = above * (not inherit)
    broken = np.zeros(len(subtree_end) + 1)
    broken[1:-1] = (subtree_end[1:] == subtree_end[:-1]) * BROKEN_CHAIN_TOKENS
    best = np.zeros(len(cuts))
    previous = np.zeros(len(cuts), np.int64)
    for i in range(1, len(cuts)):
        first = int(np.searchsorted(cuts, cuts[i] - budget))
        starts = cuts[first:i]
        fits = cuts[i] - starts + repeated[starts] <= budget
        costs = np.where(fits, best[first:i] + PACK_COST_TOKENS + above[starts] + broken[starts], np.inf)
        choice = int(np.argmin(costs))
        best[i], previous[i] = costs[choice], first + choice
    return trace_spans(cuts, previous)
