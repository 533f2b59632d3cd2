"""Scoring of finished trees: a reward for every leaf."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.rewards.base import Reward, Score, group_of
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree

_THREADS = 16


@dataclass(slots=True)
class TreeScorer:
    """Scores several trees at a time, so that a verifier or a judge that is slow on one delays no other."""

    reward: Reward
    decode: Callable[[Sequence[int]], str]
    _threads: ThreadPoolExecutor = field(init=False)
    _begun: dict[int, tuple[RolloutTree, int, "Future[Sequence[Score]]"]] = field(default_factory=dict, init=False)
    """Id of the tree object -> the tree, the step, and its scores. The tree is kept, so that its id stays its own."""

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="scorer")

    def begin(self, task: Task, tree: RolloutTree, *, step: int) -> None:
        """Begin to score a tree that `score` will be given for the same step. A second call changes nothing."""
        begun = self._begun.get(id(tree))
        if begun is None or begun[1] != step:
            self._begun[id(tree)] = tree, step, self._submit(task, tree, step)

    def forget(self, step: int) -> None:
        """Forget the trees that were begun for steps before `step` and never asked for."""
        for number, (_, begun_for, scores) in list(self._begun.items()):
            if begun_for < step:
                scores.cancel()
                del self._begun[number]

    def score(self, trees: Sequence[RolloutTree], tasks: Sequence[Task], *, step: int) -> list[ScoredTree]:
        """Score the leaves of each tree, which belongs to the task at the same position.

        Raises:
            UserError: the judge cannot be used as it is configured.
        """
        for task, tree in zip(tasks, trees, strict=True):
            self.begin(task, tree, step=step)
        scores = [self._begun.pop(id(tree))[2] for tree in trees]
        return [_scored_tree(task, tree, own.result()) for task, tree, own in zip(tasks, trees, scores, strict=True)]

    def _submit(self, task: Task, tree: RolloutTree, step: int) -> "Future[Sequence[Score]]":
        return self._threads.submit(self.reward.score_group, group_of(tree, task, self.decode, step=step))


def _scored_tree(task: Task, tree: RolloutTree, scores: Sequence[Score]) -> ScoredTree:
    return ScoredTree(
        task=task,
        tree=tree,
        rewards=np.array([score.reward for score in scores]),
        accuracies=np.array([score.accuracy for score in scores]),
        format_ok=np.array([score.format_ok for score in scores]),
        terms=_terms_by_name(scores),
        answers=[score.answer for score in scores],
        format_faults=[score.reason for score in scores],
    )


def _terms_by_name(scores: Sequence[Score]) -> dict[str, NDArray[np.float64]]:
    names = dict.fromkeys(name for score in scores for name in score.terms)
    return {name: np.array([score.terms.get(name, np.nan) for score in scores], np.float64) for name in names}


def mean_terms(trees: Sequence[Mapping[str, NDArray[np.float64]]]) -> dict[str, float]:
    """Return the mean of each reward term over the trajectories that have it.

    Args:
        trees: `ScoredTree.terms` of each tree: float64[leaves] by name, NaN if a leaf has no such term.
    """
    names = dict.fromkeys(name for terms in trees for name in terms)
    return {
        name: float(np.nanmean(np.concatenate([terms[name] for terms in trees if name in terms]))) for name in names
    }
