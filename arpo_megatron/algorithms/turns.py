"""The turns of a trajectory: what the policy says between two answers of its environment."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of MODEL tokens: a segment with its continuations by newer weights.

    Attributes:
        segments: their indices, in order.
        tokens: how many, at least 1.
        state: token ids, as bytes, of what came between the turn before and this one (prompt, tool results).
    """

    segments: tuple[int, ...]
    tokens: int
    state: bytes


def turns(tree: RolloutTree, leaf: int) -> list[Turn]:
    """The turns on the path to `leaf`, in order. A run without tokens is none."""
    found = list[Turn]()
    state, run = b"", list[int]()
    for index in [*tree.path(leaf), None]:
        if index is not None and tree.segments[index].role is Role.MODEL:
            run.append(index)
            continue
        if tokens := sum(len(tree.segments[own]) for own in run):
            found.append(Turn(tuple(run), tokens, state))
            state = b""
        run = []
        if index is not None:
            state += tree.segments[index].token_ids.tobytes()
    return found


def by_turns(
    tree: RolloutTree, outcomes: Iterable[float], values: Callable[[float, Sequence[Turn]], Iterable[float]]
) -> Floats:
    """A value for every turn, from the outcome of its trajectory.

    Args:
        tree: of the trajectories.
        outcomes: one a leaf, in the order of `tree.leaves()`.
        values: outcome and turns of a trajectory -> a value a turn.

    Returns:
        float64[leaves, segments], 0 outside of a trajectory's turns.

    Raises:
        ValueError: another number of outcomes than leaves, or of values than turns.
    """
    leaves = tree.leaves()
    found = np.zeros((len(leaves), len(tree.segments)))
    for row, (leaf, outcome) in enumerate(zip(leaves, outcomes, strict=True)):
        path = turns(tree, leaf)
        for turn, value in zip(path, values(outcome, path), strict=True):
            found[row, list(turn.segments)] = value
    return found
