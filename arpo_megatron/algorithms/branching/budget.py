"""The fork budget of a tree: which of the wanted forks are granted. Pure state: it owns no tasks and sends nothing.

Both budgets grant the same forks whatever request came back first, and no path waits for a grant.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from arpo_megatron.algorithms.branching.base import (
    BranchPolicy,
    Decision,
    ForkPoint,
    PathKey,
    fresh_path_key,
    initial_budgets,
    split_budget,
)


@dataclass(slots=True, eq=False)
class PathForks:
    """State of one path in a fork budget."""

    reserved: int = 0
    """Forks that only this path may take (`ReservedForks`)."""
    round: int = 0
    """Number of its next fork point, counted from the prompt (`PooledForks`); 0 for a path that may not fork."""
    streak: int = 0
    """Number of its fork points right before the next one that have all forked."""
    number: int = 0
    """Number of paths that were in the rounds before it (`PooledForks`)."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The decision about a fork point, and the paths to start there."""

    path: PathKey
    """The measured MODEL segment."""
    decision: Decision
    siblings: Sequence[PathForks]


@dataclass(frozen=True, slots=True)
class PathEnd:
    """Consequences of the end of a path."""

    grants: Sequence[Grant] = ()
    fresh: Sequence[tuple[PathKey, PathForks]] = ()
    """Places of the trajectories from the prompt that replace unused forks, and their part in the budget."""
    lost: int = 0
    """Planned trajectories that the end has cost."""


class ForkBudget(Protocol):
    """Distributes the M - N forks of a task."""

    @property
    def shared_round(self) -> int | None:
        """First round whose forks depend on the calls of other paths. A path's fork after its n-th tool result is in
        round n, and what is left for fresh trajectories is in the last round. None: no round does.
        """

    def start(self, initial: int, *, started: int = 0) -> list[PathForks]:
        """Return the `initial` paths from the prompt, without the first `started` ones, which may not fork."""

    def may_fork(self, path: PathForks) -> bool:
        """Whether the next fork point of a path has to be measured."""

    def measure(self, path: PathForks, point: ForkPoint) -> list[Grant]:
        """Add a measured fork point; return what can be decided now, which may concern earlier points.

        Args:
            path: the path that continues after the point.
            point: without budget and streak.
        """

    def end(self, path: PathForks, key: PathKey, *, failed: bool) -> PathEnd:
        """Remove a path that ended with the segment `key`, or with a failed call after it."""


@dataclass(slots=True)
class ReservedForks:
    """Forks divided evenly among the N first paths, and at each fork among the path and its siblings."""

    policy: BranchPolicy
    _initial: int = 0

    @property
    def shared_round(self) -> int | None:
        """None: every fork depends on the calls of its own path only."""
        return None

    def start(self, initial: int, *, started: int = 0) -> list[PathForks]:
        """Return the paths with their shares."""
        self._initial = initial
        return [PathForks(reserved=forks) for forks in initial_budgets(self.policy, initial)[started:]]

    def may_fork(self, path: PathForks) -> bool:
        """Whether the path has forks left."""
        return path.reserved > 0

    def measure(self, path: PathForks, point: ForkPoint) -> list[Grant]:
        """Decide at once, and divide what is left of the path's share."""
        decision = self.policy.decide(replace(point, budget=path.reserved, streak=path.streak))
        path.streak = path.streak + 1 if decision.siblings else 0
        path.reserved, *shares = split_budget(path.reserved - decision.siblings, 1 + decision.siblings)
        return [Grant(point.path, decision, [PathForks(reserved=own, streak=path.streak) for own in shares])]

    def end(self, path: PathForks, key: PathKey, *, failed: bool) -> PathEnd:
        """Turn the path's unused forks into fresh trajectories; a failed path loses them."""
        if failed:
            return PathEnd(lost=1 + path.reserved)
        keys = [fresh_path_key(self._initial, key, number) for number in range(path.reserved)]
        return PathEnd(fresh=[(each, PathForks()) for each in keys])


@dataclass(slots=True)
class PooledForks:
    """One pool of forks per task (ARPO, arXiv 2507.19849, section 3.1), granted in rounds.

    Round r has the r-th fork point of every path. It is decided when each living path has been measured there or has
    ended, in the order of path keys. The measured paths have continued meanwhile: siblings start from the tool result
    whenever the grant comes, and take part from the next round on. Forks that are left when all paths have ended become
    fresh trajectories. Paths are measured after the pool is spent too: that moment depends on time, the tree must not.

    A path that a failed call has ended would have taken forks, and the pool cannot know how many. So that every fork
    that is granted would also have been granted without the failure, a pool grants nothing from the round of the
    failed call on, except in a first round in which it suffices for all paths. The forks that are left then are lost.
    """

    policy: BranchPolicy
    released: bool = False
    """Follow the released code of ARPO and AEPO: a round grants in the order in which paths were started; consecutive
    forks are counted per task, by rounds with a new path; and when all paths have ended, one fresh trajectory is
    started, which may fork, until the pool is empty. Failed calls leave the forks of their paths to others."""
    shared_round: int | None = None
    """First round whose forks depend on other paths (`ForkBudget`); None if `released`: not corrected."""
    _left: int = 0
    _initial: int = 0
    _round: int = 1
    _streak: int = 0
    _started: int = 0
    _fresh: int = 0
    _failed_round: float = math.inf
    """First round that a failed call has kept a path from."""
    _living: list[PathForks] = field(default_factory=list)
    _points: defaultdict[int, list[tuple[ForkPoint, PathForks]]] = field(default_factory=lambda: defaultdict(list))

    def start(self, initial: int, *, started: int = 0) -> list[PathForks]:
        """Fill the pool and return the paths."""
        self._initial, self._left = initial, self.policy.total - initial
        if not self.released:
            suffices = (initial - started) * getattr(self.policy, "max_siblings", self._left) <= self._left
            self.shared_round = 2 if suffices else 1
        return [self._add_path(int(self._left > 0)) for _ in range(initial - started)]

    def may_fork(self, path: PathForks) -> bool:
        """Whether the path takes part in the pool's rounds."""
        return path.round > 0

    def measure(self, path: PathForks, point: ForkPoint) -> list[Grant]:
        """Add the point to its round."""
        self._points[path.round].append((point, path))
        path.round += 1
        return self._decide_rounds()

    def end(self, path: PathForks, key: PathKey, *, failed: bool) -> PathEnd:
        """Remove the path from all later rounds."""
        if path in self._living:  # not a probe, nor a fresh trajectory that may not fork
            self._living.remove(path)
            if failed and self.shared_round is not None:
                self._failed_round = min(self._failed_round, max(path.round, self.shared_round))
        grants = self._decide_rounds()
        lost = int(failed)
        if not self._living and self._failed_round < math.inf:
            lost, self._left = lost + self._left, 0
        return PathEnd(grants, self._top_up(), lost)

    def _add_path(self, round_: int, streak: int = 0) -> PathForks:
        path = PathForks(round=round_, streak=streak, number=self._started)
        self._started += 1
        self._living.append(path)
        return path

    def _top_up(self) -> list[tuple[PathKey, PathForks]]:
        """Return the trajectories that replace unused forks, once no path is living."""
        if self._living:
            return []
        count = min(1, self._left) if self.released else self._left
        keys = [fresh_path_key(self._initial, (), self._fresh + number) for number in range(count)]
        self._left, self._fresh = self._left - count, self._fresh + count
        if not self.released:
            return [(key, PathForks()) for key in keys]
        if keys:
            self._end_round(forked=True)  # the new path counts in the round that it ends
        return [(key, self._add_path(self._round)) for key in keys]

    def _decide_rounds(self) -> list[Grant]:
        """Decide all rounds that no living path can still reach."""
        grants = []
        while self._points and all(path.round > self._round for path in self._living):
            points = self._points.pop(self._round, [])
            points.sort(key=lambda item: item[1].number if self.released else item[0].path)
            granted = [self._decide(*item) for item in points]
            self._end_round(forked=any(grant.siblings for grant in granted))
            grants += granted
        return grants

    def _end_round(self, *, forked: bool) -> None:
        self._round += 1
        self._streak = self._streak + 1 if forked else 0

    def _decide(self, point: ForkPoint, path: PathForks) -> Grant:
        streak = self._streak if self.released else path.streak
        left = self._left if self._round < self._failed_round else 0
        decision = self.policy.decide(replace(point, budget=left, streak=streak))
        path.streak = path.streak + 1 if decision.siblings else 0
        siblings = [self._add_path(self._round + 1, path.streak) for _ in range(decision.siblings)]
        self._left -= decision.siblings
        return Grant(point.path, decision, siblings)


def make_fork_budget(policy: BranchPolicy) -> ForkBudget:
    """Return the budget that a policy asks for with `released_rounds` or `reserves_forks`; else a plain pool."""
    if getattr(policy, "released_rounds", False):
        return PooledForks(policy, released=True)
    return ReservedForks(policy) if getattr(policy, "reserves_forks", False) else PooledForks(policy)
