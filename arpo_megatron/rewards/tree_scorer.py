"""Scores many trees in parallel: while one waits for a verifier or a judge, others are scored."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.rewards.base import Reward, Score, group_of
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree

_THREADS = 16


@dataclass(frozen=True, slots=True)
class TreeScorer:
    """A reward with the decoder that it needs to read trees.

    Mathematics takes at most `verify.QUESTION_TIMEOUT_S` per tree and worker process, so the time of a call is bounded.
    The time of a judge is bounded by `reward.judge`, unless training waits for it.
    """

    reward: Reward
    decode: Callable[[Sequence[int]], str]

    def score(self, trees: Sequence[RolloutTree], tasks: Sequence[Task], *, step: int = 0) -> list[list[Score]]:
        """Return the scores of every tree's leaves, in the order of `trees`.

        Raises:
            UserError: the judge cannot be used as it is configured.
        """
        groups = [group_of(tree, task, self.decode, step=step) for tree, task in zip(trees, tasks, strict=True)]
        with ThreadPoolExecutor(min(_THREADS, max(1, len(trees))), thread_name_prefix="scorer") as threads:
            return list(threads.map(self.reward.score_group, groups))


def terms_by_name(scores: Sequence[Score]) -> dict[str, NDArray[np.float64]]:
    """Collect the terms of a tree's scores: float64[leaves] by name, NaN if a leaf has no such term."""
    names = dict.fromkeys(name for score in scores for name in score.terms)
    return {name: np.array([score.terms.get(name, np.nan) for score in scores], np.float64) for name in names}


def mean_terms(trees: Sequence[Mapping[str, NDArray[np.float64]]]) -> dict[str, float]:
    """Return the mean of each term over the trajectories of several trees (from `terms_by_name`) that have it."""
    names = dict.fromkeys(name for terms in trees for name in terms)
    return {
        name: float(np.nanmean(np.concatenate([terms[name] for terms in trees if name in terms]))) for name in names
    }
