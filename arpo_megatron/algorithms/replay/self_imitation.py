"""Self-imitation: trajectories better than their group are trained again while they are better than usual."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.replay.whole_trees import decode_trees, encode_trees, replay_metrics, storable_tree
from arpo_megatron.rewards.scored_tree import ScoredTree

Count = Annotated[int, Field(gt=0)]


@dataclass(slots=True)
class SelfImitation:
    """Train a full buffer of good trajectories in addition to a step's own, then empty it (SPEAR, arXiv 2509.22601, eq.
    1-5).
    Experimental: the formula comes from public notes on the paper.

    A trajectory that earned more than the mean of its group (A > 0) enters the buffer. Once the buffer is full,
    trajectories with R - P50 > 0 are trained with the advantage gamma * (R - P50), where P50 is the median of the last
    groups' mean rewards (eq. 2 and 3; no division by a deviation). gamma warms up as imitation_weight * (1 - cos(pi * t
    / T)) / 2 with t at most T; as a factor of a positive advantage it weighs PPO's term (eq. 5). The equations come
    from public notes on the paper; filling, emptying and warm-up from its released code (`TrajectoryBufferBatch`,
    `dp_actor.py`). The code averages the two parts separately; here their tokens have the weights of one batch. The
    authors' ratio refers to the policy that sampled, clipped token by token; here it refers to the step's policy, and
    `algorithm.sampling_correction` weighs a token by the rest.
    """

    imitation_capacity: Count = 128
    """Trajectories that fill the buffer; the oldest leave it first. 2048 in the released scripts; the default suits
    small steps."""
    imitation_baselines: Count = 10240
    """Number of groups whose means are remembered."""
    imitation_age: Count = 10
    """Largest number of steps that a trajectory is kept."""
    imitation_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the imitation after the warm-up."""
    imitation_warmup: Count = 200
    """T, in steps."""
    _kept: deque[ScoredTree] = field(default_factory=deque, init=False)
    _means: deque[float] = field(default_factory=deque, init=False)
    _ages: list[int] = field(default_factory=list, init=False)

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """Return the tree unchanged; remember its mean and its good trajectories."""
        if len(item.rewards):
            mean = float(np.mean(item.rewards))
            self._means.append(mean)
            self._kept += [storable_tree(item, [int(row)]) for row in np.flatnonzero(item.rewards > mean)]
        while len(self._means) > self.imitation_baselines:
            self._means.popleft()
        while len(self._kept) > self.imitation_capacity:
            self._kept.popleft()
        return item

    def extra_trees(self, trees: int, step: int) -> list[ScoredTree]:
        """Return the buffer's trajectories that are better than usual, one tree each, once it is full."""
        self._kept = deque(item for item in self._kept if step - item.tree.step <= self.imitation_age)
        gamma = self.imitation_weight * (1 - cos(pi * min(1.0, step / self.imitation_warmup))) / 2
        if len(self._kept) < self.imitation_capacity:
            return []
        usual = float(np.median(self._means))
        chosen = [replace(item, advantages=gamma * (item.rewards - usual)) for item in self._kept]
        self._kept.clear()
        chosen = [item for item in chosen if item.advantages is not None and item.advantages[0] > 0]
        self._ages = [step - item.tree.step for item in chosen]
        return chosen

    def metrics(self) -> Mapping[str, float]:
        """Return counts of imitated and stored trajectories, and the ages of the imitated ones."""
        ages, self._ages = self._ages, []
        return replay_metrics(self._kept, ages)

    def snapshot(self) -> Callable[[], bytes]:
        """Capture the buffer and the means."""
        kept, means = tuple(self._kept), tuple(self._means)
        return lambda: msgspec.msgpack.encode({"kept": encode_trees(kept), "means": means})

    def restore(self, state: bytes) -> None:
        """Replace the buffer and the means by those that a `snapshot` encoded."""
        values: dict[str, Any] = msgspec.msgpack.decode(state)
        self._kept, self._means = deque(decode_trees(values["kept"])), deque(values["means"])
