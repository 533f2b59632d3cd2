"""Every branching decision of a finished tree, derived once more from nothing but the tree, the settings and the seed.

The grower decides while answers come in; this walks the finished tree in the order of places. That both agree is what
"a decision is a pure function of (tree, entropies, seed)" means (`arpo replay-tree`).
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from arpo_megatron.algorithms.branching import (
    BranchPolicy,
    Decision,
    ForkPoint,
    PathKey,
    Probe,
    ProbingPolicy,
    initial_budgets,
    split_budget,
)
from arpo_megatron.tree import Float32Array, Role, RolloutTree

_TOLERANCE = 1e-9
"""Relative, for dH and probability: another build of numpy may sum in another order. Draws are compared exactly."""


class Difference(Exception):  # noqa: N818  (no error of this program: it is what was looked for)
    """Where a stored tree is not what follows from it; the message says segment, stored and derived value."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A MODEL segment to look at next; the fields are those of the grower's `_Place`, `above` the TOOL segment."""

    index: int
    key: PathKey
    forks: int
    above: int | None = None
    start_entropies: Float32Array | None = None
    before_entropies: Float32Array | None = None
    streak: int = 0


@dataclass(slots=True)
class _Walk:
    tree: RolloutTree
    policy: BranchPolicy
    children: list[list[int]] = field(init=False)
    pending: list[_Path] = field(default_factory=list)
    decisions: int = 0
    unused: int = 0

    def __post_init__(self) -> None:
        self.children = self.tree.children()

    def run(self) -> None:
        first = self.children[0]
        initial = self._initial(first)
        reserved = initial_budgets(self.policy, initial)
        if len(first) < len(reserved):
            raise Difference(f"segment 0: {len(first)} trajectories begin here, derived at least {len(reserved)}")
        reserved += [0] * (len(first) - len(reserved))
        self.pending = [_Path(i, (place,), n) for place, (i, n) in enumerate(zip(first, reserved, strict=True))][::-1]
        while self.pending:
            self._look_at(self.pending.pop())
        if len(first) != (derived := initial + self.unused):
            raise Difference(f"segment 0: {len(first)} trajectories begin here, derived {derived}")

    def _initial(self, first: list[int]) -> int:
        """N, which follows from the first trajectory where the policy probes."""
        if not isinstance(self.policy, ProbingPolicy):
            return self.policy.initial
        entropies, below = [], first[:1]
        while below:
            chain = self._chain(below[0])
            entropies.append(self._entropies(chain))
            tool = self.children[chain[-1]]
            below = self.children[tool[0]][:1] if tool else []
        return self.policy.plan(Probe(entropies[0], tuple(entropies[1:]))) if entropies else self.policy.initial

    def _look_at(self, path: _Path) -> None:
        """Derive the decision at the beginning of a segment, and share out what is left of its forks."""
        chain = self._chain(path.index)
        entropies = self._entropies(chain)
        siblings, kept, streak = self._siblings(path), path.forks, path.streak
        derived = self._decision(path, entropies)
        self._compare(path.index, derived)
        for piece in chain[1:]:
            self._compare(piece, None)
        if path.above is not None:
            wanted = 0 if derived is None else derived.siblings
            if len(siblings) != wanted:
                raise Difference(f"segment {path.above}: {len(siblings)} forks are stored here, derived {wanted}")
            streak = (path.streak + 1 if wanted else 0) if derived is not None else path.streak
            kept, *given = split_budget(path.forks - wanted, 1 + wanted)
            # Below the measured path, whose place comes first, in depth-first order.
            for place, (index, forks) in reversed(list(enumerate(zip(siblings, given, strict=True), start=1))):
                key = (*path.key[:-1], place)
                self.pending.append(_Path(index, key, forks, None, path.start_entropies, path.before_entropies, streak))
        self._go_on(replace(path, forks=kept, streak=streak), chain[-1], entropies)

    def _go_on(self, path: _Path, last: int, entropies: Float32Array) -> None:
        below = self.children[last]
        if not below:
            self.unused += path.forks
            return
        tool, *others = below
        if others or not self.children[tool]:
            raise Difference(f"segment {last}: a call has one TOOL segment below it, with a MODEL segment below that")
        start = entropies if path.start_entropies is None else path.start_entropies
        key = (*path.key, 0, 0)
        self.pending.append(_Path(self.children[tool][0], key, path.forks, tool, start, entropies, path.streak))

    def _chain(self, index: int) -> list[int]:
        """A MODEL segment and its continuations by newer weights."""
        chain = [index]
        segments = self.tree.segments
        while (below := self.children[chain[-1]]) and segments[below[0]].role is Role.MODEL:
            if len(below) > 1:
                raise Difference(f"segment {chain[-1]}: newer weights go on with it once, not {len(below)} times")
            chain.append(below[0])
        return chain

    def _entropies(self, chain: list[int]) -> Float32Array:
        parts = [self.tree.segments[index].entropies for index in chain]
        return np.concatenate([np.zeros(0, np.float32), *(part for part in parts if part is not None)])

    def _siblings(self, path: _Path) -> list[int]:
        return [] if path.above is None else self.children[path.above][1:]

    def _decision(self, path: _Path, entropies: Float32Array) -> Decision | None:
        """None where the grower does not ask."""
        measured = self.policy.measured_tokens
        if path.above is None or not path.forks or not measured:
            return None
        if path.start_entropies is None or path.before_entropies is None:
            raise AssertionError("a segment behind a tool result has a segment before it")
        self.decisions += 1
        return self.policy.decide(
            ForkPoint(
                task_id=self.tree.task_id,
                step=self.tree.step,
                path=path.key,
                start_entropies=path.start_entropies,
                before_entropies=path.before_entropies,
                entropies=entropies[:measured],
                budget=path.forks,
                streak=path.streak,
            )
        )

    def _compare(self, index: int, derived: Decision | None) -> None:
        stored = self.tree.segments[index].branch
        if stored is None or derived is None:
            if stored is not None or derived is not None:
                raise Difference(f"segment {index}: decision {stored}, derived {derived and derived.record}")
            return
        for name in ("draw", "dH", "probability", "why"):
            ours, theirs = getattr(derived.record, name), getattr(stored, name)
            exact = name in ("draw", "why")
            if ours != theirs if exact else not math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise Difference(f"segment {index}: {name} {theirs!r}, derived {ours!r}")


def replay_decisions(tree: RolloutTree, policy: BranchPolicy) -> int:
    """Derive all decisions of a tree again; returns how many there are.

    Args:
        tree: finished, with its entropies.
        policy: that grew it, with its settings and seed.

    Raises:
        Difference: the first one, in depth-first order, that is not what was stored: a draw, an entropy, a rule, the
            forks below a tool result, or the fresh trajectories that the unused forks became.
    """
    walk = _Walk(tree, policy)
    walk.run()
    return walk.decisions
