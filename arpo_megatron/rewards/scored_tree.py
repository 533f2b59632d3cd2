"""A finished tree with what its leaves earned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """A finished tree of a task with what its leaves earned.

    Attributes:
        task: the question.
        tree: its trajectories.
        rewards: float64[leaves] in the order of `tree.leaves()`.
        accuracies: float64[leaves], how right each answer is, in [0, 1].
        format_ok: bool[leaves], whether the trajectory keeps to the tag protocol.
        dropped: why it is not trained (`collector.DROPS`); None: it is.
        replayed: trajectories of it that are stored ones (`algorithm.replay`), the last ones.
        terms: what went into the rewards, by name: float64[leaves], NaN where a leaf has no such part.
        advantages: float64[leaves], those that the store has given; None: the step's estimator gives them.
    """

    task: Task
    tree: RolloutTree
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    format_ok: NDArray[np.bool_]
    dropped: str | None = None
    replayed: int = 0
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    advantages: NDArray[np.float64] | None = None

    @property
    def sampled(self) -> bool:
        """Whether a trajectory of it is the step's own: a tree of stored ones alone stands beside the step's trees."""
        return self.replayed < len(self.rewards)

    @classmethod
    def incomplete(cls, task: Task, tree: RolloutTree, dropped: str) -> "ScoredTree":
        """One that was given up: its leaves have earned nothing, so the arrays are empty."""
        return cls(task, tree, np.zeros(0), np.zeros(0), np.zeros(0, bool), dropped)
