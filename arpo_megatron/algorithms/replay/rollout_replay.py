"""Rollout replay: stored trees of the last steps are part of every step."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.replay.whole_trees import packed, replay_metrics, stored, unpacked
from arpo_megatron.rewards.scored_tree import ScoredTree

Count = Annotated[int, Field(gt=0)]


@dataclass(slots=True)
class RolloutReplay:
    """Of the trees that a step trains, `rollout_share` are stored ones, drawn at random; the oldest go first.

    Rollout replay of difficulty-targeted selection (arXiv 2506.05316, section 4.3 and algorithm 1, lines 16 to 19): a
    share 1 - delta of each batch is taken from the buffer instead of being sampled. `train.tasks_per_step` counts the
    sampled trees, delta * B. With `rollout_age`, the history window of ReMix (arXiv 2507.06892), whose share is p. A
    stored tree is trained whole, and its advantages are compared within it as they were. Trees without spread in their
    rewards are not stored. A tree may be replayed in several steps. The paper's ratio is that to the policy that
    sampled; `algorithm.trajectory_weight_limit` weighs whole trajectories by it, and `algorithm.loss=mix_ppg` clips it
    by token. (`arpo plan` counts the sampled trees alone.)

    Attributes:
        rollout_share: 1 - delta; 0.5 in the released script.
        rollout_capacity: trees in the buffer, the oldest go first; 512 in the released script.
        rollout_age: most steps since a tree was begun; 0: no limit but the buffer's.
    """

    rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    rollout_capacity: Count = 512
    rollout_age: Annotated[int, Field(ge=0)] = 0
    _kept: deque[ScoredTree] = field(default_factory=deque, init=False)
    _fresh: list[ScoredTree] = field(default_factory=list, init=False)
    _ages: list[int] = field(default_factory=list, init=False)

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """The tree as it is; it is stored for the steps behind this one."""
        if len(item.rewards) and np.ptp(item.rewards) > 0:
            self._fresh.append(stored(item))
        return item

    def added(self, trees: int, step: int) -> list[ScoredTree]:
        """Different trees of earlier steps, as many as make up their share, or all there are."""
        if self.rollout_age:
            self._kept = deque(item for item in self._kept if step - item.tree.step <= self.rollout_age)
        wanted = round(trees * self.rollout_share / (1 - self.rollout_share))
        drawn = random.Random(f"rollout-replay-{step}").sample(list(self._kept), min(wanted, len(self._kept)))
        self._ages = [step - item.tree.step for item in drawn]
        self._kept += self._fresh
        self._fresh = []
        while len(self._kept) > self.rollout_capacity:
            self._kept.popleft()
        return drawn

    def metrics(self) -> Mapping[str, float]:
        """Trees replayed, trajectories stored, and the age of what was replayed."""
        ages, self._ages = self._ages, []
        return replay_metrics(self._kept, ages)

    def snapshot(self) -> Callable[[], bytes]:
        """All stored trees."""
        return partial(packed, (*self._kept, *self._fresh))

    def restore(self, state: bytes) -> None:
        """Inverse of `snapshot`."""
        self._kept, self._fresh = deque(unpacked(state)), []
