"""Derives the branching decisions of a finished tree again, from the tree, the policy's settings and the seed.

The grower decides while answers arrive; this walks the finished tree depth first. `arpo replay-tree` shows with it that
a decision is a pure function of tree, entropies and seed.
"""

import math
from dataclasses import dataclass, replace

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
        DecisionMismatchError: the first difference in depth-first order. It concerns a draw, an entropy, a rule, the
            forks after a tool result, or the fresh trajectories from unused forks.
    """
    return _Replay(tree.grown, policy).run()


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of a MODEL segment; the fields are those of the grower's `BranchStart`."""

    index: int
    key: PathKey
    budget: int
    tool: int | None = None
    start_entropies: Float32Array | None = None
    before_entropies: Float32Array | None = None
    streak: int = 0


class _Replay:
    def __init__(self, tree: RolloutTree, policy: BranchPolicy) -> None:
        self._tree, self._policy = tree, policy
        self._children = tree.children()
        self._pending: list[_Start] = []
        self._decisions = self._unused = 0

    def run(self) -> int:
        first = self._children[0]
        initial = self._initial(first)
        budgets = initial_budgets(self._policy, initial)
        if len(first) < len(budgets):
            raise DecisionMismatchError(f"segment 0: {len(first)} trajectories start here, derived {len(budgets)}")
        budgets += [0] * (len(first) - len(budgets))  # fresh trajectories
        starts = [_Start(index, (n,), budget) for n, (index, budget) in enumerate(zip(first, budgets, strict=True))]
        self._pending = starts[::-1]
        while self._pending:
            self._replay(self._pending.pop())
        if len(first) != (derived := initial + self._unused):
            raise DecisionMismatchError(f"segment 0: {len(first)} trajectories start here, derived {derived}")
        return self._decisions

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

    def _replay(self, start: _Start) -> None:
        """Derive the decision in a segment, compare it, and continue with siblings and the next segment."""
        chain = self._chain(start.index)
        entropies = self._entropies(chain)
        decision = self._decide(start, entropies)
        self._compare(start.index, decision)
        for index in chain[1:]:
            self._compare(index, None)
        if start.tool is not None:
            wanted = 0 if decision is None else decision.siblings
            siblings = self._children[start.tool][1:]
            if len(siblings) != wanted:
                raise DecisionMismatchError(f"segment {start.tool}: {len(siblings)} forks are stored, derived {wanted}")
            streak = start.streak if decision is None else start.streak + 1 if wanted else 0
            kept, *shares = split_budget(start.budget - wanted, 1 + wanted)
            for n, (index, budget) in reversed(list(enumerate(zip(siblings, shares, strict=True), start=1))):
                key = (*start.key[:-1], n)
                self._pending.append(replace(start, index=index, key=key, budget=budget, tool=None, streak=streak))
            start = replace(start, budget=kept, streak=streak)
        self._follow(start, chain[-1], entropies)

    def _follow(self, start: _Start, last: int, entropies: Float32Array) -> None:
        """Continue below the last node of a segment, or count the budget of a path that ended there."""
        below = self._children[last]
        if not below:
            self._unused += start.budget
            return
        tool, *others = below
        record = self._tree.segments[tool].tool
        if record is not None and record.status == FAILED_CALL and not (others or self._children[tool]):
            return  # the path is lost with its budget
        if others or not self._children[tool]:
            raise DecisionMismatchError(f"segment {last}: expected one TOOL segment with a MODEL segment below it")
        first = entropies if start.start_entropies is None else start.start_entropies
        key = (*start.key, 0, 0)
        self._pending.append(_Start(self._children[tool][0], key, start.budget, tool, first, entropies, start.streak))

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

    def _decide(self, start: _Start, entropies: Float32Array) -> Decision | None:
        """Ask the policy; None if the grower does not ask here."""
        measured = self._policy.measured_tokens
        if start.tool is None or not start.budget or not measured:
            return None
        if start.start_entropies is None or start.before_entropies is None:
            raise AssertionError("a segment after a tool result has a segment before it")
        self._decisions += 1
        return self._policy.decide(
            ForkPoint(
                task_id=self._tree.task_id,
                step=self._tree.step,
                path=start.key,
                start_entropies=start.start_entropies,
                before_entropies=start.before_entropies,
                entropies=entropies[:measured],
                budget=start.budget,
                streak=start.streak,
            )
        )

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
