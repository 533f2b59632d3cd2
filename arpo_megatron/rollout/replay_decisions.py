"""Derives the branching decisions of a finished tree again, from the tree, the policy's settings and the seed.

The grower decides while answers arrive; this walks the finished tree path by path. `arpo replay-tree` shows with it
that a decision is a pure function of tree, entropies and seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arpo_megatron.algorithms.branching import (
    BranchPolicy,
    Decision,
    ForkPoint,
    Grant,
    PathForks,
    PathKey,
    Probe,
    ProbingPolicy,
    make_fork_budget,
)
from arpo_megatron.tree import FAILED_CALL, Float32Array, Role, RolloutTree

_TOLERANCE = 1e-9
"""Relative tolerance of dH and probability: builds of numpy sum in different orders. Draws are compared exactly."""


class DecisionMismatchError(Exception):
    """A stored tree differs from the derived decisions; the message has the segment and both values."""


def replay_decisions(tree: RolloutTree, policy: BranchPolicy) -> int:
    """Derive all decisions of a tree again; return their number.

    Args:
        tree: a finished tree with its entropies; branches that it has lost are included.
        policy: the policy that grew it, with its settings and seed.

    Raises:
        DecisionMismatchError: a difference in a draw, an entropy, a rule, the forks after a tool result, or the fresh
            trajectories from unused forks.
    """
    return _Replay(tree.grown, policy).run()


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of a MODEL segment; the fields are those of the grower's `BranchStart`."""

    index: int
    key: PathKey
    forks: PathForks
    tool: int | None = None
    start_entropies: Float32Array | None = None
    before_entropies: Float32Array | None = None


class _Replay:
    def __init__(self, tree: RolloutTree, policy: BranchPolicy) -> None:
        self._tree, self._policy, self._forks = tree, policy, make_fork_budget(policy)
        self._children = tree.children()
        self._pending: list[_Start] = []
        self._measured: dict[PathKey, _Start] = {}
        self._derived: set[int] = set()
        self._initial_paths = self._fresh = 0

    def run(self) -> int:
        first = self._children[0]
        self._initial_paths = initial = self._initial(first)
        if len(first) < initial:
            raise DecisionMismatchError(f"segment 0: {len(first)} trajectories start here, derived {initial}")
        probes = int(isinstance(self._policy, ProbingPolicy))
        self._walk(first[:probes], [PathForks() for _ in range(probes)])
        self._walk(first[probes:initial], self._forks.start(initial, started=probes), probes)
        if len(first) != (derived := initial + self._fresh):
            raise DecisionMismatchError(f"segment 0: {len(first)} trajectories start here, derived {derived}")
        for index, segment in enumerate(self._tree.segments):
            if segment.role is Role.MODEL and index not in self._derived:
                self._compare(index, None)
        return len(self._derived)

    def _walk(self, starts: Sequence[int], forks: Sequence[PathForks], place: int = 0) -> None:
        """Follow trajectories from the prompt, the first of which has the path key `(place,)`, and their siblings."""
        numbered = enumerate(zip(starts, forks, strict=True), start=place)
        self._pending = [_Start(index, (n,), own) for n, (index, own) in numbered][::-1]
        while self._pending:
            self._follow(self._pending.pop())

    def _initial(self, first: list[int]) -> int:
        """Return the number of initial trajectories; a probing policy derives it from the first one."""
        if not isinstance(self._policy, ProbingPolicy) or not first:
            return self._policy.initial
        entropies, below = [], first[:1]
        while below:
            chain = self._chain(below[0])
            entropies.append(self._entropies(chain))
            tool = self._children[chain[-1]]
            below = self._children[tool[0]][:1] if tool else []
        return self._policy.plan(Probe(entropies[0], tuple(entropies[1:])))

    def _follow(self, start: _Start) -> None:
        """Measure a segment as the grower did, and continue below it, or end the path."""
        chain = self._chain(start.index)
        entropies = self._entropies(chain)
        if start.tool is not None and self._policy.measured_tokens and self._forks.may_fork(start.forks):
            self._measure(start, entropies)
        below = self._children[chain[-1]]
        if not below:
            self._end(start, failed=False)
            return
        tool, *others = below
        record = self._tree.segments[tool].tool
        if record is not None and record.status == FAILED_CALL and not (others or self._children[tool]):
            self._end(start, failed=True)
            return
        if others or not self._children[tool]:
            raise DecisionMismatchError(f"segment {chain[-1]}: expected one TOOL segment with a MODEL segment below it")
        first = entropies if start.start_entropies is None else start.start_entropies
        key = (*start.key, 0, 0)
        self._pending.append(_Start(self._children[tool][0], key, start.forks, tool, first, entropies))

    def _measure(self, start: _Start, entropies: Float32Array) -> None:
        if start.start_entropies is None or start.before_entropies is None:
            raise AssertionError("a segment after a tool result has a segment before it")
        self._measured[start.key] = start
        point = ForkPoint(
            task_id=self._tree.task_id,
            step=self._tree.step,
            path=start.key,
            start_entropies=start.start_entropies,
            before_entropies=start.before_entropies,
            entropies=entropies[: self._policy.measured_tokens],
        )
        self._grant(self._forks.measure(start.forks, point))

    def _end(self, start: _Start, *, failed: bool) -> None:
        end = self._forks.end(start.forks, start.key, failed=failed)
        self._grant(end.grants)
        for key, forks in end.fresh:
            stored = self._children[0][self._initial_paths + self._fresh :][:1]
            self._pending += [_Start(index, key, forks) for index in stored]
            self._fresh += 1

    def _grant(self, grants: Sequence[Grant]) -> None:
        """Compare decisions, and continue with the siblings that they start."""
        for grant in grants:
            start = self._measured.pop(grant.path)
            if start.tool is None:
                raise AssertionError("only a segment after a tool result is measured")
            self._derived.add(start.index)
            self._compare(start.index, grant.decision)
            siblings, wanted = self._children[start.tool][1:], len(grant.siblings)
            if len(siblings) != wanted:
                raise DecisionMismatchError(f"segment {start.tool}: {len(siblings)} forks are stored, derived {wanted}")
            for n, (index, forks) in enumerate(zip(siblings, grant.siblings, strict=True), start=1):
                self._pending.append(replace(start, index=index, key=(*start.key[:-1], n), forks=forks, tool=None))

    def _chain(self, index: int) -> list[int]:
        """Return a MODEL segment and its continuations by newer weights."""
        chain = [index]
        while (below := self._children[chain[-1]]) and self._tree.segments[below[0]].role is Role.MODEL:
            if len(below) > 1:
                raise DecisionMismatchError(f"segment {chain[-1]}: {len(below)} continuations, expected one")
            chain.append(below[0])
        return chain

    def _entropies(self, chain: list[int]) -> Float32Array:
        entropies = [self._tree.segments[index].entropies for index in chain]
        return np.concatenate([np.zeros(0, np.float32), *(each for each in entropies if each is not None)])

    def _compare(self, index: int, derived: Decision | None) -> None:
        stored = self._tree.segments[index].branch
        if stored is None or derived is None:
            if stored is not None or derived is not None:
                text = f"segment {index}: stored decision {stored}, derived {derived and derived.record}"
                raise DecisionMismatchError(text)
            return
        for name in ("draw", "dH", "probability", "why"):
            ours, theirs = getattr(derived.record, name), getattr(stored, name)
            exact = name in ("draw", "why")
            if ours != theirs if exact else not math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise DecisionMismatchError(f"segment {index}: stored {name} {theirs!r}, derived {ours!r}")
