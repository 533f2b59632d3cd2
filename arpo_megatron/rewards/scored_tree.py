"""A finished tree with the scores of its leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """A finished tree of a task with the scores of its leaves."""

    task: Task
    tree: RolloutTree
    """Its trajectories."""
    rewards: NDArray[np.float64]
    """float64[leaves], in the order of `tree.leaves()`."""
    accuracies: NDArray[np.float64]
    """float64[leaves], correctness of each answer, in [0, 1]."""
    format_ok: NDArray[np.bool_]
    """bool[leaves], whether the trajectory follows the tag protocol."""
    dropped: str | None = None
    """Why the tree is not trained (a reason of `trainer.collector`); None: it is."""
    replayed: int = 0
    """Number of its trajectories that come from a replay buffer (`algorithm.replay`); they are the last ones."""
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Terms of the rewards by name: float64[leaves], NaN if a leaf has no such term."""
    answers: Sequence[str | None] = ()
    """The answer that was read from each leaf; None: it has none."""
    format_faults: Sequence[str] = ()
    """How each leaf breaks the tag protocol; "" if it does not."""
    advantages: NDArray[np.float64] | None = None
    """float64[leaves], set by a replay buffer; None: the step's estimator computes them."""

    @property
    def sampled(self) -> bool:
        """Whether the step has sampled one of its trajectories; False for trees that a replay buffer added."""
        return self.replayed < len(self.rewards)

    @classmethod
    def incomplete(cls, task: Task, tree: RolloutTree, dropped: str) -> "ScoredTree":
        """Return a dropped tree: its leaves have no rewards, so the arrays are empty."""
        return cls(task, tree, np.zeros(0), np.zeros(0), np.zeros(0, bool), dropped)
