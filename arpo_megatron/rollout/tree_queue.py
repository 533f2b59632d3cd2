"""Trees of one purpose in the pool, until they are collected, and the report of their collection."""

import asyncio
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineUnavailableError
from arpo_megatron.engine.request import EngineRefusedError
from arpo_megatron.rollout.accounting import RolloutCounts, TreeStats, rollout_stats
from arpo_megatron.rollout.admission_gate import TreeAdmission
from arpo_megatron.rollout.admission_state import AdmissionFigures
from arpo_megatron.rollout.context import PromptTooLongError, ToolTextError
from arpo_megatron.rollout.environments import EnvironmentStateError, TreeEnvironments
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.lost_branches import AllBranchesLostError
from arpo_megatron.rollout.messages import FailedTree, RolloutReport
from arpo_megatron.rollout.tools import ToolBlockedError
from arpo_megatron.tree import RolloutTree
from tools_sandbox.client import SandboxError

TREE_FAILURES = (
    *(EngineUnavailableError, EngineRefusedError, SandboxError, AllBranchesLostError),
    *(PromptTooLongError, ToolTextError, EnvironmentStateError),
)
"""Expected errors of one tree. Any other error fails its tree, too, and its traceback is printed."""


class TreeStoppedError(Exception):
    """The tree was stopped before it was finished."""


@dataclass(slots=True)
class PoolTree:
    """A tree that grows, or that waits for its collection."""

    tree_id: int
    routing_key: str
    version: int
    """Policy version at its start."""
    grower: TreeGrower
    admission: TreeAdmission | None = None
    environments: TreeEnvironments | None = None
    job: "asyncio.Task[None] | None" = None
    result: RolloutTree | Exception | None = None
    """The finished tree, or why it failed; None while it grows."""
    stats: TreeStats | None = None
    """Figures of a finished tree, computed at its end: at the end of a step they would block the event loop."""


@dataclass(slots=True)
class TreeQueue:
    """Trees of one purpose, which are collected together, and their costs since the last report."""

    policy: BranchPolicy
    """Branch policy of the newest tree."""
    limits: RolloutLimits
    """Limits of the newest tree."""
    trees: list[PoolTree] = field(default_factory=list)
    """Trees that were not collected, in the order of their start."""
    unfinished: Counter[int] = field(default_factory=Counter)
    """Number of unfinished trees by policy version at their start."""
    prefills: RolloutCounts = field(default_factory=RolloutCounts)
    """Costs of prefixes that were prefilled for several trees."""
    since: float = field(default_factory=time.monotonic)
    """Time of the last report, or of the first tree's start."""
    tokens: int = 0
    """Tokens sampled since then."""
    trees_running: int = 0
    """Most trees of all purposes with an admitted path since then; it may wait for a tool."""
    trees_waiting: int = 0
    """Most trees of all purposes without one that waited for admission since then."""

    def note(self, admission: AdmissionFigures) -> None:
        """Note how many trees run and wait now."""
        self.trees_running = max(self.trees_running, admission.trees_running)
        self.trees_waiting = max(self.trees_waiting, admission.trees_waiting)

    def overdue(self, finish_before: int | None) -> bool:
        """Return whether a tree that started before a policy version is unfinished."""
        return finish_before is not None and any(
            count and version < finish_before for version, count in self.unfinished.items()
        )

    def report(self, count: int, finish_before: int | None) -> RolloutReport:
        """Take the `count` oldest finished trees out, and all that started before a version; return their report."""
        finished = sorted((tree for tree in self.trees if tree.result is not None), key=lambda tree: tree.version)
        due = 0 if finish_before is None else sum(tree.version < finish_before for tree in finished)
        collected = finished[: max(count, due)]
        taken = set(map(id, collected))
        self.trees = [tree for tree in self.trees if id(tree) not in taken]
        counts, self.prefills = self.prefills, RolloutCounts()
        for tree in collected:
            counts.add(tree.grower.counts)
        trees = [tree.result for tree in collected if isinstance(tree.result, RolloutTree)]
        failed = [_failed_tree(tree, tree.result) for tree in collected if isinstance(tree.result, Exception)]
        now = time.monotonic()

        each = [tree.stats for tree in collected if tree.stats is not None]
        stats = rollout_stats(
            trees,
            counts,
            each,
            failed=len(failed),
            seconds=now - self.since,
            trees_running=self.trees_running,
            trees_waiting=self.trees_waiting,
        )
        self.since, self.tokens = now, 0
        self.trees_running = self.trees_waiting = 0
        calls = sum((tree.grower.calls for tree in collected), Counter[tuple[str, bool]]())
        reasons = {tool: why for tree in collected for tool, why in tree.grower.failed_calls.items()}
        return RolloutReport(trees, failed, stats, tuple(tree.tree_id for tree in collected), reasons, calls)


def _failed_tree(tree: PoolTree, error: Exception) -> FailedTree:
    reason = f"{type(error).__name__}: {error}"
    if not isinstance(error, (*TREE_FAILURES, TreeStoppedError)):
        reason += " (its traceback is in rollout.log)"
    try:
        partial_tree = tree.grower.partial_tree()
    except Exception:  # the error that failed the tree may be in its record
        traceback.print_exc()
        partial_tree = RolloutTree(tree.grower.task_id, tree.grower.prompt)
    return FailedTree(partial_tree, reason, blocked=str(error) if isinstance(error, ToolBlockedError) else "")
