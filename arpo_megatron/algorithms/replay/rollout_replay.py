"""Rollout replay: stored trees of the last steps are part of every step."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.replay.whole_trees import decode_trees, encode_trees, replay_metrics, storable_tree
from arpo_megatron.rewards.scored_tree import ScoredTree

Count = Annotated[int, Field(gt=0)]


@dataclass(slots=True)
class RolloutReplay:
    """Draw a share of the trees that a step trains from a buffer of earlier trees, at random; the oldest leave it
    first.

    Rollout replay of difficulty-targeted selection (arXiv 2506.05316, section 4.3 and algorithm 1, lines 16 to 19): a
    share 1 - delta of each batch comes from the buffer instead of the engine. `train.tasks_per_step` counts the sampled
    trees, delta * B. With `rollout_age` this is the history window of ReMix (arXiv 2507.06892), whose share is p. A
    stored tree is trained whole, and its advantages are compared within it as before. Trees without spread in their
    rewards are not stored. A tree may be replayed in several steps. The paper's ratio refers to the policy that
    sampled: `algorithm.sampling_correction` weighs tokens by it, and `algorithm.loss=mix_ppg` clips it.
    `arpo plan` counts the sampled trees only.
    """

    rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """1 - delta; 0.5 in the released script."""
    rollout_capacity: Count = 512
    """Trees in the buffer; 512 in the released script."""
    rollout_age: Annotated[int, Field(ge=0)] = 0
    """Largest number of steps since a tree was started; 0: no limit but the buffer's."""
    _kept: deque[ScoredTree] = field(default_factory=deque, init=False)
    _fresh: list[ScoredTree] = field(default_factory=list, init=False)
    _ages: list[int] = field(default_factory=list, init=False)

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """Return the tree unchanged and store it for later steps."""
        if len(item.rewards) and np.ptp(item.rewards) > 0:
            self._fresh.append(storable_tree(item))
        return item

    def extra_trees(self, trees: int, step: int) -> list[ScoredTree]:
        """Draw different trees of earlier steps: as many as make up their share, or all there are."""
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
        """Return counts of replayed trees and stored trajectories, and the ages of the replayed trees."""
        ages, self._ages = self._ages, []
        return replay_metrics(self._kept, ages)

    def snapshot(self) -> Callable[[], bytes]:
        """Return an encoder of the trees that are stored now."""
        return partial(encode_trees, (*self._kept, *self._fresh))

    def restore(self, state: bytes) -> None:
        """Replace the stored trees by those that a `snapshot` encoded."""
        self._kept, self._fresh = deque(decode_trees(state)), []
