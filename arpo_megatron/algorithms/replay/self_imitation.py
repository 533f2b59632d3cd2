"""Self-imitation: what did better than its group is trained again where it is still better than usual (SPEAR)."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.replay.whole_trees import packed, replay_metrics, stored, unpacked
from arpo_megatron.rewards.scored_tree import ScoredTree

Count = Annotated[int, Field(gt=0)]


@dataclass(slots=True)
class SelfImitation:
    """Trains a full buffer of good trajectories beside a step's own, and empties it (SPEAR, arXiv 2509.22601, eq. 1-5).

    A trajectory that earned more than the mean of its group (A > 0) goes into the buffer. Once that is full, those with
    R - P50 > 0 are trained with the advantage gamma * (R - P50), P50 the median of the last groups' mean rewards (eq. 2
    and 3: no division by a deviation). gamma warms up as imitation_weight * (1 - cos(pi * t / T)) / 2, t at most T; as
    a factor of a positive advantage it weighs PPO's term (eq. 5). Equations as public notes on the paper quote them;
    filling, emptying and the warm-up as in its released code (`TrajectoryBufferBatch`, `dp_actor.py`). There the two
    parts are averaged each by itself; here their tokens have the weights of one minibatch. The authors' ratio is that
    to the policy that sampled, clipped token by token; here it is that to the step's policy, and
    `algorithm.trajectory_weight_limit` weighs a trajectory by the rest.

    Attributes:
        imitation_capacity: trajectories that fill the buffer, the oldest go first; 2048 in the released scripts, ours
            is for small steps.
        imitation_baselines: groups whose means are remembered.
        imitation_age: most steps that a trajectory is kept for.
        imitation_weight: of the imitation when it is warm.
        imitation_warmup: T in steps.
    """

    imitation_capacity: Count = 128
    imitation_baselines: Count = 10240
    imitation_age: Count = 10
    imitation_weight: Annotated[float, Field(gt=0)] = 1.0
    imitation_warmup: Count = 200
    _kept: deque[ScoredTree] = field(default_factory=deque, init=False)
    _means: deque[float] = field(default_factory=deque, init=False)
    _ages: list[int] = field(default_factory=list, init=False)

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """The tree as it is; its mean and its good trajectories are remembered."""
        if len(item.rewards):
            mean = float(np.mean(item.rewards))
            self._means.append(mean)
            self._kept += [stored(item, [int(row)]) for row in np.flatnonzero(item.rewards > mean)]
        while len(self._means) > self.imitation_baselines:
            self._means.popleft()
        while len(self._kept) > self.imitation_capacity:
            self._kept.popleft()
        return item

    def added(self, trees: int, step: int) -> list[ScoredTree]:
        """The buffer's trajectories that are better than usual, a tree each, when it is full; otherwise none."""
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
        """Trajectories imitated, what is stored, and the age of what was imitated."""
        ages, self._ages = self._ages, []
        return replay_metrics(self._kept, ages)

    def snapshot(self) -> Callable[[], bytes]:
        """The buffer and the means."""
        kept, means = tuple(self._kept), tuple(self._means)
        return lambda: msgspec.msgpack.encode({"kept": packed(kept), "means": means})

    def restore(self, state: bytes) -> None:
        """Inverse of `snapshot`."""
        found: dict[str, Any] = msgspec.msgpack.decode(state)
        self._kept, self._means = deque(unpacked(found["kept"])), deque(found["means"])
