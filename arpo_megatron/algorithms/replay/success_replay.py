"""Replay of successes into groups that have failed."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.replay.base import StoredTrajectory, replace_trajectory, stored_trajectory
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import RolloutTree

Count = Annotated[int, Field(gt=0)]


@dataclass(slots=True)
class SuccessReplay:
    """Keep each task's last successes; a group with low mean and no spread gets one in place of its last leaf.

    GUI-ARPO (Agentic Replay Policy Optimization, arXiv 2505.16282). The authors treat replayed samples as sampled by
    the present policy (ratio 1); here the stored sampling log-probs give their tokens importance weights
    (`algorithm.sampling_correction`). The newest success of a task is replayed, because it is the least stale.
    """

    replay_keep: Count = 8
    """Successes kept per task; the oldest are dropped first."""
    replay_capacity: Count = 1024
    """Successes kept in total; the oldest are dropped first."""
    replay_std_below: float = 0.05
    """A group gets a replay if the standard deviation of its rewards is below this."""
    replay_mean_below: float = 0.2
    """A group gets a replay only if the mean of its rewards is below this."""
    success_above: float = 0.5
    """A trajectory is a success if its accuracy exceeds this."""
    _kept: deque[tuple[str, StoredTrajectory]] = field(default_factory=deque, init=False)
    _ages: list[int] = field(default_factory=list, init=False)

    def mix(self, item: ScoredTree, step: int) -> ScoredTree:
        """Return the group, with a success of the same prompt in it if it needs one and one is stored."""
        kept = self._newest(item.task.id, item)
        wanted = len(item.rewards) > 0 and (
            float(np.std(item.rewards)) < self.replay_std_below
            and float(np.mean(item.rewards)) < self.replay_mean_below
        )
        for row in np.flatnonzero(item.accuracies > self.success_above):
            self._keep(item.task.id, stored_trajectory(item, int(row)))
        if not wanted or kept is None:
            return item
        self._ages.append(step - kept.step)
        return replace_trajectory(item, len(item.rewards) - 1, kept)

    def metrics(self) -> Mapping[str, float]:
        """Return counts of mixed trees and stored successes, and the ages of the replayed ones."""
        ages, self._ages = self._ages, []
        return {
            "replay/trees": len(ages),
            "replay/stored": len(self._kept),
            **({"replay/age": float(np.mean(ages)), "replay/age_max": max(ages)} if ages else {}),
        }

    def snapshot(self) -> Callable[[], bytes]:
        """Capture all successes, in the lossless form of trees."""
        return partial(_packed, tuple(self._kept))

    def restore(self, state: bytes) -> None:
        """Replace the stored trajectories by those that a `snapshot` encoded."""
        self._kept = deque(_unpacked(row) for row in msgspec.msgpack.decode(state))

    def _newest(self, task_id: str, item: ScoredTree) -> StoredTrajectory | None:
        prompt = item.tree.prompt_ids
        for own, kept in reversed(self._kept):
            if own == task_id and np.array_equal(kept.prompt.token_ids, prompt):
                return kept
        return None

    def _keep(self, task_id: str, stored: StoredTrajectory) -> None:
        self._kept.append((task_id, stored))
        own = [place for place, (other, _) in enumerate(self._kept) if other == task_id]
        if len(own) > self.replay_keep:
            del self._kept[own[0]]
        while len(self._kept) > self.replay_capacity:
            self._kept.popleft()


def _packed(kept: tuple[tuple[str, StoredTrajectory], ...]) -> bytes:
    rows: list[dict[str, Any]] = []
    for task_id, each in kept:
        tree = RolloutTree(task_id, each.prompt.token_ids, step=each.step)
        for above, segment in enumerate(each.segments):
            tree.append(above, segment)
        scores = {"reward": each.reward, "accuracy": each.accuracy, "format_ok": each.format_ok}
        rows.append({"tree": tree.to_dict(), **scores})
    return msgspec.msgpack.encode(rows)


def _unpacked(row: dict[str, Any]) -> tuple[str, StoredTrajectory]:
    tree = RolloutTree.from_dict(row["tree"])
    prompt, *segments = tree.segments
    scores = (float(row["reward"]), float(row["accuracy"]), bool(row["format_ok"]))
    return tree.task_id, StoredTrajectory(prompt, tuple(segments), *scores, step=tree.step)
