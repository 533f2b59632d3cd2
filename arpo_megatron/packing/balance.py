"""Which trees go into which pack, where a large tree is cut, and which rank computes what: decisions as pure functions.

Costs are in query-key pairs, the unit of attention work; `CostModel` says how many of them a token is worth outside of
attention, and a prediction in the output head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import forward_flops
from arpo_megatron.packing.layout import Span

CUT_STEP = 64
"""A long chain may be cut at every multiple of this many tokens from its start."""
PACK_COST_TOKENS = 512
"""What one more pack costs, in tokens; an inherited or repeated ancestor costs one."""
BROKEN_CHAIN_TOKENS = 16
"""What a cut inside a chain costs besides: the pack before it has to wait with its activations."""
PAIR_SLOWNESS = 3.0
"""Seconds of an attention FLOP over those of a FLOP elsewhere: `arpo bench pack` measures 3.2 on two idle cores."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimated work of a stretch of tokens.

    Attributes:
        token_pairs: work of a token in the layers outside attention, in query-key pairs.
        target_pairs: work of a predicted token in the output head, in query-key pairs.
    """

    token_pairs: float
    target_pairs: float = 0.0

    @classmethod
    def of(cls, spec: ModelSpec) -> "CostModel":
        """From the FLOPs of a model, an attention FLOP taking `PAIR_SLOWNESS` as long as another."""
        pair, _ = forward_flops(spec, 0, 1, 0)
        token, target = forward_flops(spec, 1, 0, 1)
        return cls(token / pair / PAIR_SLOWNESS, target / pair / PAIR_SLOWNESS)

    def cost(self, tokens: int, pairs: int, targets: int) -> float:
        """Work in query-key pairs."""
        return self.token_pairs * tokens + pairs + self.target_pairs * targets


TYPICAL_COST = CostModel(token_pairs=4000.0)
"""Of a model of medium size; a job takes `CostModel.of` its own."""


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `sizes` in groups whose sums stay within `budget`; a larger item is alone, an empty one left out."""
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        place = next((g for g, room in enumerate(free) if sizes[index] <= room), None)
        if place is None:
            groups.append([index])
            free.append(budget - sizes[index])
        else:
            groups[place].append(index)
            free[place] -= sizes[index]
    return groups


def balanced_groups(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """As few groups as first-fit-decreasing needs, with costs as equal as a greedy division makes them.

    The costliest item first, each to the cheapest group that has room. Where that leaves one without room, the groups
    of first-fit-decreasing stay.
    """
    fitted = first_fit_decreasing(sizes, budget)
    groups: list[list[int]] = [[] for _ in fitted]
    room, load = [budget] * len(fitted), [0.0] * len(fitted)
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -costs[i]):
        fits = [g for g in range(len(groups)) if sizes[index] <= room[g] or not groups[g]]
        if not fits:
            return fitted
        place = min(fits, key=lambda g: load[g])
        groups[place].append(index)
        room[place] -= sizes[index]
        load[place] += costs[index]
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
    """Number of ancestors of each token: subtrees opened before it, less those that have ended."""
    n = len(subtree_end)
    ended = np.cumsum(np.bincount(subtree_end, minlength=n + 1))[:n]
    return np.arange(n) - ended


def allowed_cuts(subtree_end: NDArray[np.int32], step: int) -> NDArray[np.int64]:
    """Ascending positions, 0 and n among them, at most `step` apart: chain boundaries and places inside chains."""
    n = len(subtree_end)
    # A chain goes on from t-1 to t when t is the only child: then both subtrees end at one place.
    heads = (
        np.flatnonzero(np.concatenate([[True], subtree_end[1:] != subtree_end[:-1]])) if n else np.zeros(0, np.int64)
    )
    edges = np.append(heads, n)
    steps = [np.arange(low, high, step) for low, high in pairwise(edges)]
    return np.concatenate([*steps, [n]]).astype(np.int64)


def trace_spans(cuts: NDArray[np.int64], previous: NDArray[np.int64]) -> list[Span]:
    """The spans that end at the last cut, where `previous[i]` numbers the cut at which the span up to cut i begins."""
    spans: list[Span] = []
    i = len(cuts) - 1
    while i > 0:
        spans.append((int(cuts[previous[i]]), int(cuts[i])))
        i = int(previous[i])
    return spans[::-1]


def cut_spans(subtree_end: NDArray[np.int32], budget: int, *, inherit: bool) -> list[Span]:
    """Where a tree larger than the budget is cut: few packs, at places with few ancestors.

    Args:
        subtree_end: int32[n] of a whole tree in depth-first order.
        budget: most tokens that a pack computes.
        inherit: ancestors come from earlier packs; otherwise they are computed again and count. (The budget is then
            raised to the longest path: a job's config refuses a smaller one.) What lies between two neighbouring
            cuts is a part of one chain, so with its ancestors it is a part of one path and always fits.
    """
    step = max(1, min(CUT_STEP, budget // 2))
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
