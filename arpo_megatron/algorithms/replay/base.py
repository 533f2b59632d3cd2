"""What an experience store answers, and how a stored trajectory is put into a tree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import RolloutTree, Segment


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A finished trajectory and what it earned.

    Attributes:
        prompt: its PROMPT segment.
        segments: the others, in order from the prompt; with the log-probs at which the engine sampled them.
        reward: its reward.
        accuracy: how right its answer is, in [0, 1].
        format_ok: whether it keeps to the tag protocol.
        step: rollout step in which its tree was begun.
    """

    prompt: Segment
    segments: tuple[Segment, ...]
    reward: float
    accuracy: float
    format_ok: bool
    step: int


class ReplayBuffer(Protocol):
    """Keeps finished trajectories, a bounded number, and replays them. Only the controller holds one. Deterministic.

    What it replays keeps its sampling log-probs, with which `algorithm.trajectory_weight_limit` corrects.
    """

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """A tree of the step as it is to be trained; the store takes in from it what it wants to keep."""

    def metrics(self) -> Mapping[str, float]:
        """`replay/...` of what was mixed since the last call."""

    def snapshot(self) -> Callable[[], bytes]:
        """All of its state at this moment; the bytes are asked for later, in another thread."""

    def restore(self, state: bytes) -> None:
        """Go on where `snapshot` was taken."""


@runtime_checkable
class AddsTrees(Protocol):
    """What an experience store adds that trains stored trajectories beside a step's trees, not in the place of some."""

    def added(self, trees: int, step: int) -> list[ScoredTree]:
        """Trees of stored trajectories alone (`replayed` counts all of them), asked for once a step, after all `mix`.

        Args:
            trees: how many the step has sampled.
            step: rollout step.
        """


def stored_trajectory(item: ScoredTree, row: int) -> StoredTrajectory:
    """Trajectory number `row` of a tree. Expert routes are left out: newer weights choose others."""
    tree = item.tree
    path = [replace(tree.segments[index], routes=None) for index in tree.path(tree.leaves()[row])]
    return StoredTrajectory(
        prompt=path[0],
        segments=tuple(path[1:]),
        reward=float(item.rewards[row]),
        accuracy=float(item.accuracies[row]),
        format_ok=bool(item.format_ok[row]),
        step=tree.step,
    )


def replace_trajectory(item: ScoredTree, row: int, kept: StoredTrajectory) -> ScoredTree:
    """The tree with a stored trajectory, from the prompt, in the place of its trajectory number `row`.

    Stored ones stand behind all others (`ScoredTree.replayed`). Segments that only that one holds go. Trees of the same
    task have the same prompt; ValueError where not.
    """
    old = item.tree
    if not np.array_equal(old.prompt_ids, kept.prompt.token_ids):
        raise ValueError(f"the stored trajectory has another prompt than task {old.task_id}")
    leaves = old.leaves()
    rest = leaves[:row] + leaves[row + 1 :]
    held = {index for leaf in rest for index in old.path(leaf)}
    root = old.segments[0]
    tree = RolloutTree(old.task_id, root.token_ids, routes=root.routes, step=old.step, seconds=old.seconds)
    places = {0: 0}
    for index in sorted(held - {0}):
        segment = old.segments[index]
        places[index] = tree.append(places[segment.parent], segment)
    above = 0
    for segment in kept.segments:
        above = tree.append(above, segment)
    order = [*range(row), *range(row + 1, len(leaves))]

    def column(values: Sequence[float] | np.ndarray, own: float) -> np.ndarray:
        return np.append(np.asarray(values)[order], own)

    return replace(
        item,
        tree=tree,
        rewards=column(item.rewards, kept.reward),
        accuracies=column(item.accuracies, kept.accuracy),
        format_ok=column(item.format_ok, kept.format_ok).astype(bool),
        replayed=item.replayed + 1,
        terms={name: column(values, np.nan) for name, values in item.terms.items()},
    )
