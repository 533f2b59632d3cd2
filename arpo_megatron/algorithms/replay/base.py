"""The protocol of replay buffers, and how a stored trajectory is put into a tree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import RolloutTree, Segment


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A finished trajectory with its scores."""

    prompt: Segment
    segments: tuple[Segment, ...]
    """The other segments, in order from the prompt, with the log-probs at which the engine sampled them."""
    reward: float
    accuracy: float
    """Correctness of its answer, in [0, 1]."""
    format_ok: bool
    """Whether it follows the tag protocol."""
    step: int
    """Rollout step in which its tree was started."""


class ReplayBuffer(Protocol):
    """Keeps a bounded number of finished trajectories and replays them. Only the controller holds one. Deterministic.

    Replayed trajectories keep their sampling log-probs, which `algorithm.sampling_correction` needs.
    """

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """Return a tree of the step as it is to be trained, and store what the buffer needs from it."""

    def metrics(self) -> Mapping[str, float]:
        """Return `replay/...` metrics of what was mixed since the last call."""

    def snapshot(self) -> Callable[[], bytes]:
        """Capture the whole state now; the result is called later, in another thread, for its bytes."""

    def restore(self, state: bytes) -> None:
        """Restore the state that `snapshot` captured."""


@runtime_checkable
class AddsTrees(Protocol):
    """Implemented by replay buffers that train stored trajectories in addition to a step's trees."""

    def extra_trees(self, trees: int, step: int) -> list[ScoredTree]:
        """Return trees of stored trajectories alone (`replayed` counts all of them). Called once per step, after all
        `mix`.

        Args:
            trees: number of trees that the step has sampled.
            step: rollout step.
        """


def stored_trajectory(item: ScoredTree, row: int) -> StoredTrajectory:
    """Return trajectory number `row` of a tree. Expert routes are left out because newer weights choose others."""
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


def replace_trajectory(item: ScoredTree, row: int, stored: StoredTrajectory) -> ScoredTree:
    """Return the tree with a stored trajectory, from the prompt, in place of its trajectory number `row`.

    Stored trajectories come after all others (`ScoredTree.replayed`). Segments that only the replaced one holds are
    removed. Trees of the same task have the same prompt; ValueError if they do not.
    """
    old = item.tree
    if not np.array_equal(old.prompt_ids, stored.prompt.token_ids):
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
    for segment in stored.segments:
        above = tree.append(above, segment)
    order = [*range(row), *range(row + 1, len(leaves))]

    def column(values: Sequence[float] | np.ndarray, own: float) -> np.ndarray:
        return np.append(np.asarray(values)[order], own)

    return replace(
        item,
        tree=tree,
        rewards=column(item.rewards, stored.reward),
        accuracies=column(item.accuracies, stored.accuracy),
        format_ok=column(item.format_ok, stored.format_ok).astype(bool),
        replayed=item.replayed + 1,
        terms={name: column(values, np.nan) for name, values in item.terms.items()},
        answers=[*(item.answers[place] for place in order), None] if item.answers else (),
        format_faults=[*(item.format_faults[place] for place in order), ""] if item.format_faults else (),
    )
