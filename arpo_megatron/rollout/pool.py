"""The trees that are growing: started at any time, collected when they are finished, kept across weight pushes.

One pool lives as long as the rollout process. A tree belongs to a group (training, evaluation) and remembers the policy
version at its start. While the pool is paused no request is in flight, and generations that were cut short wait to go
on with the next policy; tool calls go on meanwhile.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import EngineRefusedError
from arpo_megatron.rollout.accounting import RolloutCounts, common_prefix_length, rollout_stats
from arpo_megatron.rollout.context import PromptTooLongError, RolloutContext, RolloutLimits, TextCodec, ToolTextError
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.messages import (
    CollectTrees,
    IncompleteTree,
    LiveTree,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    StaleEnginesError,
    StartTrees,
)
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tree import Int32Array, RolloutTree
from tools_sandbox.client import SandboxError

TREE_FAILURES = (EngineUnavailableError, EngineRefusedError, SandboxError, PromptTooLongError, ToolTextError)
"""What makes a tree a failed one. Anything else is a defect and ends the call with its traceback."""


class GivenUpError(Exception):
    """Nobody wants the tree any longer."""


_PROGRESS_INTERVAL_S = 0.25
_HEARTBEAT_S = 1.0


@dataclass(slots=True)
class _Growing:
    """A tree under way, and what became of it: None while it grows."""

    tree_id: int
    version: int
    grower: TreeGrower
    job: "asyncio.Task[None] | None" = None
    result: RolloutTree | Exception | None = None


@dataclass(slots=True)
class _Group:
    """Trees that are collected together, in the order of their start.

    Attributes:
        trees: not collected yet.
        unfinished: how many of them still grow, by the version at their start.
        policy: of the newest.
        limits: likewise.
        prefills: cost of what was prefilled for them together.
        since: when the last report was made, or the first tree began.
        tokens: sampled for them since then.
        defect: what went wrong in a tree that is not the outside's fault; the next `collect` raises it.
    """

    policy: BranchPolicy
    limits: RolloutLimits
    trees: list[_Growing] = field(default_factory=list)
    unfinished: Counter[int] = field(default_factory=Counter)
    prefills: RolloutCounts = field(default_factory=RolloutCounts)
    since: float = field(default_factory=time.monotonic)
    tokens: int = 0
    defect: Exception | None = None


class TreePool:
    """Grows trees in the running event loop.

    Args:
        engine: where tokens come from; not shared with another pool.
        tools: where tools are called.
        codec: the tokenizer.
        seed: the run's.
        policy: how trees with these settings branch.
        send: is called with a `RolloutProgress` now and then while a `collect` waits.
        record: is called with a tree's number and each new entry of its record.
        routes: what the engine's expert routes look like; None: it tells none.
    """

    def __init__(
        self,
        engine: EngineClient,
        tools: ToolClient,
        codec: TextCodec,
        seed: int,
        policy: Callable[[RolloutSettings], BranchPolicy],
        send: Callable[[RolloutProgress], None],
        record: Callable[[int, bytes], None],
        routes: ExpertRouteSpec | None = None,
    ) -> None:
        self._engine = engine
        self._tools = tools
        self._codec = codec
        self._seed = seed
        self._policy = policy
        self._send = send
        self._record = record
        self._routes = routes
        self._groups: dict[str, _Group] = {}
        self._stale: set[str] = set()
        self._changed = asyncio.Event()
        self._again: asyncio.Task[None] | None = None  # prefills what all prompts begin with, after a push

    def start(self, request: StartTrees) -> None:
        """Begin to grow trees, or go on with them; returns at once. Those that are here already are left alone."""
        self._engine.version = max(self._engine.version, request.version)
        known = {tree.tree_id for group in self._groups.values() for tree in group.trees}
        asked = [tree for tree in request.trees if tree.tree_id not in known]
        prompts = [np.array(self._codec.encode(tree.task.prompt_text), dtype=np.int32) for tree in asked]
        costs = RolloutCounts()
        # Also of trees that go on: engines that were started with a resumed run hold nothing of them.
        common = asyncio.create_task(self._prefill_first(prompts, costs))
        for each, prompt in zip(asked, prompts, strict=True):
            policy = self._policy(each.settings)
            group = self._groups.setdefault(each.group, _Group(policy, each.settings.limits))
            group.policy, group.limits = policy, each.settings.limits
            if not group.trees:
                group.since = time.monotonic()
            tree = _Growing(each.tree_id, each.version, self._grower(each, prompt, group))
            group.trees.append(tree)
            group.unfinished[tree.version] += 1
            tree.job = asyncio.create_task(self._grow(tree, group, common, costs))

    def _grower(self, tree: LiveTree, prompt: Int32Array, group: _Group) -> TreeGrower:
        settings = tree.settings
        context = RolloutContext(
            engine=self._engine,
            tools=self._tools,
            codec=self._codec,
            policy=group.policy,
            sampling=settings.sampling,
            limits=settings.limits,
            seed=self._seed,
            step=tree.step,
            on_tokens=partial(self._count_tokens, group),
            routes=self._routes if settings.expert_routes else None,
            ready=self._ready,
        )
        record = partial(self._record, tree.tree_id)
        return TreeGrower(tree.task.id, prompt, context, entries=tree.entries, record=record)

    async def collect(self, request: CollectTrees) -> RolloutReport:
        """Wait for trees of a group, and give them away: the oldest finished ones.

        See `CollectTrees` for how many. A defect in any tree of the group is raised.

        Raises:
            StaleEnginesError: engines need a push first; nothing was given away.
        """
        group = self._groups.get(request.group)
        if group is None:
            raise ValueError(f"no trees were started in group {request.group!r}")
        count = len(group.trees) if request.count is None else min(request.count, len(group.trees))
        await self._until_finished(group, count, request.finish_before)
        return self._report(group, count, request.finish_before)

    async def finish(self, name: str) -> None:
        """Wait until no tree of a group grows."""
        if (group := self._groups.get(name)) is not None:
            await self._until_finished(group, len(group.trees), None)

    async def stop(self, name: str) -> RolloutReport:
        """Give up all trees of a group that were not collected. The engine is left without their requests."""
        group = self._groups.pop(name)
        await self.pause()
        await _cancel(group.trees)
        for tree in group.trees:
            if tree.result is None:
                tree.result = GivenUpError("given up")
        self._engine.resume(self._engine.version)
        return self._report(group, len(group.trees), None)

    async def _until_finished(self, group: _Group, count: int, finish_before: int | None) -> None:
        """Until `count` trees are finished and all that began before a version, telling how far it is."""
        sent_at = 0.0
        while True:
            if group.defect is not None:
                raise group.defect
            if self._stale:
                urls, self._stale = sorted(self._stale), set()
                raise StaleEnginesError(*urls)
            growing = group.unfinished.total()
            if time.monotonic() - sent_at >= _PROGRESS_INTERVAL_S:
                sent_at = time.monotonic()
                self._send(RolloutProgress(min(count, len(group.trees) - growing), count, group.tokens))
            if len(group.trees) - growing >= count and not self._overdue(group, finish_before):
                return
            self._changed.clear()
            with suppress(TimeoutError):  # what waits at the other end is told that nothing has happened, too
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._changed.wait()

    async def pause(self) -> None:
        """Let no request pass, cut those short that run, and return when the engine is idle."""
        await self._engine.pause()

    def resume(self, version: int) -> None:
        """Go on with policy `version`, which every engine has now."""
        self._stale.clear()
        self._engine.resume(version)
        if self._again is None or self._again.done():  # else it is made again by itself
            self._again = asyncio.create_task(self._prefill_again())

    async def close(self) -> None:
        """Give up all trees."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
        await _cancel([tree for group in self._groups.values() for tree in group.trees])

    def note_stale(self, url: str) -> None:
        """An engine serves older weights than its trees need (it was restarted): the next wait says so."""
        self._stale.add(url)
        self._changed.set()

    @staticmethod
    def _overdue(group: _Group, finish_before: int | None) -> bool:
        return finish_before is not None and any(
            count and version < finish_before for version, count in group.unfinished.items()
        )

    def _report(self, group: _Group, count: int, finish_before: int | None) -> RolloutReport:
        finished = sorted((tree for tree in group.trees if tree.result is not None), key=lambda tree: tree.version)
        due = 0 if finish_before is None else sum(tree.version < finish_before for tree in finished)
        given = finished[: max(count, due)]
        taken = set(map(id, given))
        group.trees = [tree for tree in group.trees if id(tree) not in taken]
        counts, group.prefills = group.prefills, RolloutCounts()
        for tree in given:
            counts.add(tree.grower.counts)
        trees = [tree.result for tree in given if isinstance(tree.result, RolloutTree)]
        failed = [
            IncompleteTree(tree.grower.partial_tree(), f"{type(tree.result).__name__}: {tree.result}")
            for tree in given
            if isinstance(tree.result, Exception)
        ]
        now = time.monotonic()

        def inside_stop(token_ids: Int32Array) -> bool:
            return protocol.ends_inside_stop(self._codec.decode(token_ids.tolist()), group.limits.stops)

        stats = rollout_stats(
            trees, counts, group.policy, failed=len(failed), seconds=now - group.since, inside_stop=inside_stop
        )
        group.since = now
        self._send(RolloutProgress(count, count, group.tokens))
        group.tokens = 0
        return RolloutReport(trees, failed, stats, tuple(tree.tree_id for tree in given))

    async def _grow(self, tree: _Growing, group: _Group, common: "asyncio.Task[None]", costs: RolloutCounts) -> None:
        try:
            try:
                await asyncio.shield(common)
            finally:  # the first of its trees takes what it cost
                group.prefills.add(_taken(costs))
            tree.result = await tree.grower.grow()
        except TREE_FAILURES as error:
            tree.result = error
        except Exception as defect:
            group.defect = defect
        finally:
            group.unfinished[tree.version] -= 1
            self._changed.set()

    async def _prefill_first(self, prompts: Sequence[Int32Array], costs: RolloutCounts) -> None:
        """`_prefill_common` for trees that begin, after that for the others."""
        await self._ready()
        await self._prefill_common(prompts, costs)

    async def _prefill_common(self, prompts: Sequence[Int32Array], costs: RolloutCounts) -> None:
        """Put what all prompts begin with (a system prompt) into the engines' caches before they all compute it.

        What it costs is added to `costs`. It only saves work: where it is refused the trees go without, and each finds
        out whether its own requests are.
        """
        shared = common_prefix_length(prompts)
        if not shared:
            return

        def repeat() -> None:
            costs.retries += 1

        with suppress(EngineRefusedError):
            found = await self._engine.prefill_everywhere(prompts[0][:shared], on_retry=repeat)
            for prompt_tokens, cached_tokens in found:
                costs.add(RolloutCounts(requests=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))

    async def _prefill_again(self) -> None:
        """`_prefill_common` for the trees that go on after a push."""
        growing = [(group, tree) for group in self._groups.values() for tree in group.trees if tree.result is None]
        costs = RolloutCounts()
        with suppress(EngineUnavailableError):  # the trees find out by themselves
            await self._prefill_common([tree.grower.prompt for _, tree in growing], costs)
        if growing:
            growing[0][0].prefills.add(costs)

    async def _ready(self) -> None:
        if self._again is not None and not self._again.done():
            await asyncio.shield(self._again)

    def _count_tokens(self, group: _Group, tokens: int) -> None:
        group.tokens += tokens
        self._changed.set()  # a `collect` may want to tell


def _taken(counts: RolloutCounts) -> RolloutCounts:
    """A copy; the original is empty from now on."""
    copy = replace(counts)
    counts.clear()
    return copy


async def _cancel(trees: Sequence[_Growing]) -> None:
    jobs = [tree.job for tree in trees if tree.job is not None]
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
