"""All growing trees: started at any time, collected when they are finished, kept across weight pushes.

A pool lives as long as its session in the rollout process. A tree has a purpose (training, evaluation) and the policy
version of its start. While the pool is paused, no engine request is in flight; generations that were cut short
continue with the next policy. Tool calls run on during a pause.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from arpo_megatron.algorithms.branching import BranchPolicy, GrpoPolicy
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import EngineRefusedError
from arpo_megatron.rollout.accounting import RolloutCounts, TreeStats
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.admission_state import AdmissionFigures
from arpo_megatron.rollout.context import RolloutContext, routing_key
from arpo_megatron.rollout.environments import TreeEnvironments
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import (
    CollectTrees,
    LiveTree,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    StaleEnginesError,
    StartTrees,
)
from arpo_megatron.rollout.shared_prefixes import common_prefix_length
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.rollout.tree_queue import TREE_FAILURES, PoolTree, TreeQueue, TreeStoppedError
from arpo_megatron.tasks.environments.base import MakeEnvironment, can_fork
from arpo_megatron.tasks.protocols.base import CallProtocol, TextCodec
from arpo_megatron.tasks.tags.calls import ends_inside_stop
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL
from arpo_megatron.tree import Int32Array, RolloutTree

_PROGRESS_INTERVAL_S = 0.25
_HEARTBEAT_S = 1.0


class TreePool:
    """Grows trees in the running event loop.

    Args:
        engine: client of the engines; not shared with another pool.
        tools: client of the tool service.
        codec: the tokenizer.
        seed: the run's seed.
        policy: returns the branch policy for a tree's settings.
        send: called with a `RolloutProgress` now and then while a `collect` waits.
        record: called with a tree's id and each new entry of its record.
        expert_routes: sizes of the engines' expert routes; None if they return none.
        protocol: the call protocol with its tools.
        admission: lets requests pass as the engines' KV pools have room; None: all pass at once.
        make_environment: returns the environment of a trajectory; None: the policy calls tools.
        finished: called with the id of each tree that is finished, and the tree.
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
        expert_routes: ExpertRouteSpec | None = None,
        protocol: CallProtocol = DEFAULT_PROTOCOL,
        admission: AdmissionGate | None = None,
        make_environment: MakeEnvironment | None = None,
        finished: Callable[[int, RolloutTree], None] = lambda _tree_id, _tree: None,
    ) -> None:
        self._finished = finished
        self._engine = engine
        self._tools = tools
        self._protocol = protocol
        self._admission = admission
        self._make_environment = make_environment
        self._can_fork = make_environment is None or can_fork(make_environment())
        self._codec = codec
        self._seed = seed
        self._policy = policy
        self._send = send
        self._record = record
        self._expert_routes = expert_routes
        self._queues: dict[str, TreeQueue] = {}
        self._stale: set[str] = set()
        self._changed = asyncio.Event()
        self._prefill_after_push: asyncio.Task[None] | None = None

    @property
    def growing(self) -> int:
        """Number of unfinished trees."""
        return sum(queue.unfinished.total() for queue in self._queues.values())

    async def start(self, request: StartTrees) -> None:
        """Start or continue trees. Trees that are in the pool already are left alone.

        Each tree has a turn of the event loop of its own: tokenizing thousands of prompts in one would hold back the
        trees that grow.
        """
        self._engine.version = max(self._engine.version, request.version)
        known = {tree.tree_id for queue in self._queues.values() for tree in queue.trees}
        new = [tree for tree in request.trees if tree.tree_id not in known]
        prompts = list[Int32Array]()
        for each in new:
            prompts.append(np.array(self._codec.encode(each.task.prompt_text), dtype=np.int32))
            await asyncio.sleep(0)
        costs = RolloutCounts()
        # For continued trees, too: the caches of engines in a resumed run are empty.
        common = asyncio.create_task(self._prefill_new(prompts, costs))
        for each, prompt in zip(new, prompts, strict=True):
            self._start_tree(each, prompt, common, costs)
            await asyncio.sleep(0)

    def _start_tree(
        self, each: LiveTree, prompt: Int32Array, common: "asyncio.Task[None]", costs: RolloutCounts
    ) -> None:
        policy = self._policy(each.settings)
        if not self._can_fork:
            policy = GrpoPolicy(policy.total)
        limits = replace(each.settings.limits, protocol=self._protocol)
        queue = self._queues.setdefault(each.purpose, TreeQueue(policy, limits))
        queue.policy, queue.limits = policy, limits
        if not queue.trees:
            queue.since = time.monotonic()
        environments = self._environments(each)
        key = routing_key(each.step, each.task.id)
        self._engine.begin_tree(key, each.version)
        grower = self._grower(each, prompt, queue, environments)
        tree = PoolTree(each.tree_id, key, each.version, grower, grower.admission, environments)
        queue.trees.append(tree)
        queue.unfinished[tree.version] += 1
        tree.job = asyncio.create_task(self._grow(tree, queue, common, costs))

    def _grower(
        self, tree: LiveTree, prompt: Int32Array, queue: TreeQueue, environments: TreeEnvironments | None
    ) -> TreeGrower:
        settings = tree.settings
        admission = None
        if self._admission is not None:
            key = routing_key(tree.step, tree.task.id)
            admission = self._admission.tree(key, len(prompt), queue.limits.max_response_tokens)
        context = RolloutContext(
            engine=self._engine,
            tools=self._tools,
            codec=self._codec,
            policy=queue.policy,
            sampling=settings.sampling,
            limits=queue.limits,
            seed=self._seed,
            step=tree.step,
            on_tokens=partial(self._count_tokens, queue),
            expert_routes=self._expert_routes if settings.expert_routes else None,
            admission=admission,
            environments=environments,
            ready=self._ready,
        )
        record = partial(self._record, tree.tree_id)
        return TreeGrower(tree.task.id, prompt, context, entries=tree.entries, record=record)

    def _environments(self, tree: LiveTree) -> TreeEnvironments | None:
        if self._make_environment is None:
            return None
        return TreeEnvironments(self._make_environment, tree.task, tree.settings.limits.tool_timeout_s)

    async def collect(self, request: CollectTrees) -> RolloutReport:
        """Wait for finished trees of one purpose, and hand over the oldest (`CollectTrees`).

        Raises:
            StaleEnginesError: engines need a push first; nothing was collected.
        """
        queue = self._queues.get(request.purpose)
        if queue is None:
            raise ValueError(f"no trees were started with purpose {request.purpose!r}")
        count = len(queue.trees) if request.count is None else min(request.count, len(queue.trees))
        await self._until_finished(queue, count, request.finish_before)
        return self._report(queue, count, request.finish_before)

    async def finish(self, purpose: str) -> None:
        """Wait until all trees of one purpose are finished."""
        if (queue := self._queues.get(purpose)) is not None:
            await self._until_finished(queue, len(queue.trees), None)

    async def stop(self, purpose: str) -> RolloutReport:
        """Stop all trees of one purpose that were not collected, and abort their engine requests."""
        queue = self._queues[purpose]
        await self.pause()
        await _cancel(queue.trees)
        for tree in queue.trees:
            if tree.result is None:
                tree.result = TreeStoppedError("it was stopped")
        self._engine.resume(self._engine.version)
        return self._report(queue, len(queue.trees), None)

    async def _until_finished(self, queue: TreeQueue, count: int, finish_before: int | None) -> None:
        """Wait until `count` trees and all that started before a version are finished, and send progress."""
        sent_at = 0.0
        while True:
            if self._stale:
                urls, self._stale = sorted(self._stale), set()
                raise StaleEnginesError(*urls)
            growing = queue.unfinished.total()
            if time.monotonic() - sent_at >= _PROGRESS_INTERVAL_S:
                sent_at = time.monotonic()
                admission = AdmissionFigures() if self._admission is None else self._admission.figures()
                queue.note(admission)
                self._send(RolloutProgress(min(count, len(queue.trees) - growing), count, queue.tokens, admission))
            if len(queue.trees) - growing >= count and not queue.overdue(finish_before):
                return
            self._changed.clear()
            with suppress(TimeoutError):  # progress is also sent if nothing happens
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._changed.wait()

    async def pause(self) -> None:
        """Hold new requests, cut running ones short, and wait until the engines are idle."""
        await self._engine.pause()

    def resume(self, version: int) -> None:
        """Continue with policy `version`, which every engine has now."""
        self._stale.clear()
        if self._engine.keeps_kv:
            self._engine.resume(version)
            return
        if self._admission is not None:
            self._admission.flushed()
        self._engine.resume(version)
        if self._prefill_after_push is None or self._prefill_after_push.done():  # a running one restarts by itself
            self._prefill_after_push = asyncio.create_task(self._prefill_growing())

    async def close(self) -> None:
        """Cancel all trees that grow and wait for their end."""
        if self._prefill_after_push is not None:
            self._prefill_after_push.cancel()
            await asyncio.gather(self._prefill_after_push, return_exceptions=True)
        await _cancel([tree for queue in self._queues.values() for tree in queue.trees])

    def note_stale(self, url: str) -> None:
        """Note that an engine has old weights (it was restarted); waiting `collect` calls raise StaleEnginesError."""
        self._stale.add(url)
        self._changed.set()

    def _report(self, queue: TreeQueue, count: int, finish_before: int | None) -> RolloutReport:
        self._send(RolloutProgress(count, count, queue.tokens))
        return queue.report(count, finish_before)

    async def _grow(self, tree: PoolTree, queue: TreeQueue, common: "asyncio.Task[None]", costs: RolloutCounts) -> None:
        try:
            try:
                await asyncio.shield(common)
            finally:  # costs are counted in the first tree's queue
                queue.prefills.add(_taken(costs))
            result = await tree.grower.grow()
            streamed, inside_stop = tree.grower.streams, self._inside_stop(queue.limits)
            tree.result, tree.stats = result, TreeStats.of(result, queue.policy, inside_stop, streamed=streamed)
            self._finished(tree.tree_id, result)
        except Exception as error:
            tree.result = error
            if not isinstance(error, TREE_FAILURES):
                traceback.print_exc()
        finally:
            self._engine.end_tree(tree.routing_key)
            if tree.admission is not None:
                tree.admission.close()
            if tree.environments is not None:
                tree.environments.close()
            queue.unfinished[tree.version] -= 1
            self._changed.set()

    def _inside_stop(self, limits: RolloutLimits) -> Callable[[Int32Array], bool]:
        return lambda token_ids: ends_inside_stop(self._codec.decode(token_ids.tolist()), limits.stops)

    async def _prefill_new(self, prompts: Sequence[Int32Array], costs: RolloutCounts) -> None:
        await self._ready()
        await self._prefill_common(prompts, costs)

    async def _prefill_common(self, prompts: Sequence[Int32Array], costs: RolloutCounts) -> None:
        """Put the prefix that all prompts share (a system prompt) into the engines' caches, and add up the `costs`.

        It only saves work: if an engine refuses, the trees start without it.
        """
        shared = common_prefix_length(prompts)
        if not shared:
            return

        def count_retry() -> None:
            costs.retries += 1

        with suppress(EngineRefusedError):
            prefills = await self._engine.prefill_everywhere(prompts[0][:shared], on_retry=count_retry)
            for prompt_tokens, cached_tokens in prefills:
                costs.add(RolloutCounts(requests=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))

    async def _prefill_growing(self) -> None:
        """Prefill the common prefix for the trees that continue after a push."""
        growing = [(queue, tree) for queue in self._queues.values() for tree in queue.trees if tree.result is None]
        costs = RolloutCounts()
        with suppress(EngineUnavailableError):  # the trees' own requests will raise it
            await self._prefill_common([tree.grower.prompt for _, tree in growing], costs)
        if growing:
            growing[0][0].prefills.add(costs)

    async def _ready(self) -> None:
        if self._prefill_after_push is not None and not self._prefill_after_push.done():
            await asyncio.shield(self._prefill_after_push)

    def _count_tokens(self, queue: TreeQueue, tokens: int) -> None:
        queue.tokens += tokens
        self._changed.set()  # lets `collect` send progress


def _taken(counts: RolloutCounts) -> RolloutCounts:
    """Return a copy of the counts and clear them."""
    copy = replace(counts)
    counts.clear()
    return copy


async def _cancel(trees: Sequence[PoolTree]) -> None:
    jobs = [tree.job for tree in trees if tree.job is not None]
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
