"""The turns of a trajectory: runs of model tokens between two answers of the environment."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of MODEL tokens: a segment with its continuations by newer weights."""

    segments: tuple[int, ...]
    """Segment indices, in order."""
    tokens: int
    """Number of tokens, at least 1."""
    state: bytes
    """The token ids between the previous turn and this one (prompt, tool results), as bytes."""


def turns(tree: RolloutTree, leaf: int) -> list[Turn]:
    """Return the turns on the path to `leaf`, in order. A run without tokens is not a turn."""
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
    """Assign a value to every turn, given the outcome of its trajectory.

    Args:
        tree: the tree that holds the trajectories.
        outcomes: one per leaf, in the order of `tree.leaves()`.
        values: maps the outcome and the turns of a trajectory to one value per turn.

    Returns:
        float64[leaves, segments], 0 outside a trajectory's turns.

    Raises:
        ValueError: the number of outcomes differs from that of leaves, or the number of values from that of turns.
    """
    leaves = tree.leaves()
    found = np.zeros((len(leaves), len(tree.segments)))
    for row, (leaf, outcome) in enumerate(zip(leaves, outcomes, strict=True)):
        path = turns(tree, leaf)
        for turn, value in zip(path, values(outcome, path), strict=True):
            found[row, list(turn.segments)] = value
    return found
