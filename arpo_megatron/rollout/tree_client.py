"""The client through which one tree asks engine and tools: it records and counts every answer.

A tree that is grown again from its record gets the recorded answers first, and sends a request only after the last one.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from arpo_megatron.algorithms.branching import PathKey, path_seed
from arpo_megatron.engine.expert_routes import ExpertRouteRequest
from arpo_megatron.engine.request import Generation, encode_ids
from arpo_megatron.rollout.accounting import RolloutCounts
from arpo_megatron.rollout.admission_gate import RequestSlot
from arpo_megatron.rollout.context import RolloutContext, ToolTextError, routing_key
from arpo_megatron.rollout.environments import step_record
from arpo_megatron.rollout.limits import LIMIT, REPEATED, AnsweredCall
from arpo_megatron.rollout.node import Node
from arpo_megatron.rollout.record import Answer, FirstTokens, Prefill, RecordedAnswer, TreeRecord, encode_entry
from arpo_megatron.rollout.result_cache import SHARED_STATUSES, history_digest
from arpo_megatron.rollout.shared_prefixes import SharedPrefixes
from arpo_megatron.tasks.protocols.base import INVALID_CALL, ToolCall
from arpo_megatron.tasks.protocols.tools import PYTHON
from arpo_megatron.tree import FAILED_CALL, Int32Array, Role, RolloutTree, ToolRecord
from tools_sandbox.client import SandboxUnavailable, ToolAnswer

REFUSED = (INVALID_CALL, LIMIT, REPEATED)
"""Statuses of calls that are answered without the tool service."""


class TreeClient:
    """Sends the requests of one tree.

    Args:
        task_id: the tree's task.
        context: what the tree shares with others.
        entries: the tree's record, if it was grown before.
        record: called with each new entry of the record.
    """

    def __init__(
        self, task_id: str, context: RolloutContext, entries: Sequence[bytes], record: Callable[[bytes], None]
    ) -> None:
        self.counts = RolloutCounts()
        """Costs of all answers, recorded ones included."""
        self.prefixes = SharedPrefixes(self._prefill, lambda: context.engine.cache_id(self._routing_key))
        """The tree's prefixes in the engine's cache."""
        self.failed_calls: dict[str, str] = {}
        """Why the newest failed call of each tool failed, without those in the record."""
        self.calls: Counter[tuple[str, bool]] = Counter()
        """Calls that were executed for this tree, by tool and whether they were answered."""
        self._executions: dict[PathKey, str] = {}  # what equal calls of the tree share, by path key
        self._running: dict[str, asyncio.Future[RecordedAnswer]] = {}  # calls with that name
        self._record = TreeRecord.from_entries(entries)
        self._write = record
        self._started = time.monotonic() - self._record.seconds
        for prefill in self._record.prefills:
            self._count(prefill)
        self._task_id = task_id
        self._routing_key = routing_key(context.step, task_id)
        self._context = context

    @property
    def age_s(self) -> float:
        """Age of the tree in seconds, including the time up to the last entry of its record."""
        return time.monotonic() - self._started

    def sampled_s(self, node: Node, number: int) -> float | None:
        """Return the age of the tree at a generation of a MODEL segment; None if only its first tokens arrived."""
        times = self._record.sampled_s.get(node.key, [])
        return times[number] if number < len(times) else None

    def answered_s(self, node: Node) -> float | None:
        """Return the age of the tree at the result of the call that ended a segment."""
        return self._record.answered_s.get(node.key)

    def recorded(self, node: Node) -> Sequence[Generation]:
        """Return the recorded generations of a MODEL segment, in order."""
        whole = self._record.generations.get(node.key, [])
        return [*whole, self._record.first[node.key]] if node.key in self._record.first else whole

    async def sample(
        self,
        node: Node,
        prefix: Int32Array,
        previous: Sequence[Generation],
        max_new_tokens: int,
        known_routes: int,
        first: tuple[int, Callable[[Generation], None]] | None = None,
    ) -> Generation:
        """Return the next generation of a segment, from the record or from the engine.

        Args:
            node: the segment.
            prefix: int32[n], all tokens before it.
            previous: generations of the segment so far.
            max_new_tokens: at least 1.
            known_routes: number of prefix tokens whose expert routes other requests return.
            first: see `EngineClient.generate`; only if `streams`.
        """
        recorded = self.recorded(node)
        if len(previous) < len(recorded):
            return self._replayed(node, recorded[len(previous)])
        context = self._context
        seed = path_seed(context.seed, context.step, self._task_id, node.key)
        tokens = np.concatenate([prefix, *(each.token_ids for each in previous)])
        first_route = len(tokens) - 1 if len(tokens) > len(prefix) else known_routes
        routes = None if context.expert_routes is None else ExpertRouteRequest(first_route, context.expert_routes)
        began = 0.0

        async def ready() -> None:
            nonlocal began
            await self._ready(node, prefix)
            began = time.monotonic()

        async with self._turn(node, len(tokens)) as turn:
            generation = await context.engine.generate(
                tokens,
                max_new_tokens=max_new_tokens,
                sampling=replace(context.sampling, seed=seed),
                stop=context.limits.stops,
                key=self._routing_key,
                routes=routes,
                ready=ready,
                on_retry=self._count_retry,
                first=None if first is None else (first[0], partial(self._report_first, node, first[1])),
                encoded=_encoded(node, previous),
            )
            seconds = time.monotonic() - began
            turn.length, turn.cached = len(tokens) + len(generation.token_ids), generation.cached_tokens
        self.counts.tokens_recomputed += turn.recomputed
        self.counts.evicted += turn.recomputed > 0
        self.counts.suspended += turn.suspended
        self.counts.admission_s += turn.waited_s
        self.counts.longest_request_s = max(self.counts.longest_request_s, seconds)
        self.prefixes.mark_cached(node)
        self._add(node.key, generation)
        context.on_tokens(len(generation.token_ids))
        return generation

    def _replayed(self, node: Node, generation: Generation) -> Generation:
        """Count a recorded generation, and return it."""
        if generation is self._record.first.get(node.key):
            self._keep(node.key, generation)  # the request that continues after them must not replace them
        self._count(generation)
        self.counts.tokens_recorded += len(generation.token_ids)
        self._context.on_tokens(len(generation.token_ids))
        return generation

    @property
    def streams(self) -> bool:
        """Whether `sample` reports the first tokens of an answer. Expert routes come with whole answers only."""
        return self._context.engine.streams and self._context.expert_routes is None

    def _report_first(self, node: Node, call: Callable[[Generation], None], first: Generation) -> None:
        """Record first tokens, then act on them: siblings must not be recorded before what they follow from."""
        self.prefixes.mark_cached(node)
        self._keep(node.key, FirstTokens(first))
        call(first)

    def add_path(self, node: Node) -> None:
        """Add a path that starts with a MODEL segment."""
        self.prefixes.add_path(node)
        if self._context.admission is not None:
            self._context.admission.add_path(node)

    def extend_path(self, tool: Node) -> None:
        """Extend a path by a TOOL segment."""
        self.prefixes.extend_path(tool)

    def end_path(self, node: Node) -> None:
        """End a path with this segment."""
        self.prefixes.end_path(node)
        if self._context.admission is not None:
            self._context.admission.end_path(node)

    def _turn(self, node: Node, length: int) -> AbstractAsyncContextManager[RequestSlot]:
        admission = self._context.admission
        return nullcontext(RequestSlot(length)) if admission is None else admission.turn(node, length)

    async def call_tool(self, node: Node, call: AnsweredCall) -> RecordedAnswer:
        """Return the result of the call that ended a segment, from the record or from the tool service.

        A call that fails, also when it is repeated, has status `FAILED_CALL` and no tokens. An equal call of the tree
        to one of `RolloutLimits.shared_tools` takes the result of the first one whatever it is: if failures were
        shared only sometimes, the chance that a trajectory remains would be unknown (`algorithms/advantages/lost.py`).
        """
        name = self._shared_call_key(node, call)
        if name is not None:
            self._executions[node.key] = name
        if (recorded := self._record.tool_results.get(node.key)) is not None:
            self._count(recorded)
            return recorded
        known = None if name is None else self._record.shared_results.get(name)
        first = None if name is None else self._running.get(name)
        if known is None:
            waiting = asyncio.ensure_future(self._ask(node, call, name)) if first is None else first
            if name is not None:
                self._running[name] = waiting
            admission = self._context.admission
            executes = isinstance(call, ToolCall)  # other calls have their results already
            with admission.tool_call(node) if admission is not None and executes else nullcontext():
                result = await waiting
            if first is None:
                return result
            known = result
        self.counts.seconds_saved += known.tool.seconds
        shared = replace(known, tool=replace(known.tool, cached=True))
        self._add(node.key, shared)
        return shared

    def same_calls(self, tree: RolloutTree, keys: Sequence[PathKey]) -> dict[int, int]:
        """Return `RolloutTree.same_calls` of a tree that has grown, given the path key of each segment."""
        results = self._record.tool_results
        executed = {name for key, name in self._executions.items() if key in results and not results[key].tool.cached}
        calls: dict[str, list[int]] = defaultdict(list)
        for index, segment in enumerate(tree.segments):
            name = self._executions.get(keys[segment.parent]) if segment.role is Role.TOOL else None
            if name is not None:
                calls[name].append(index)
        same = dict[int, int]()
        for name, equal in calls.items():
            same |= dict.fromkeys(equal[1:], equal[0]) if name in executed else dict.fromkeys(equal, -1)
        return same

    def _shared_call_key(self, node: Node, call: AnsweredCall) -> str | None:
        """Return a name that the call shares with equal calls; None: the tool is executed for each call."""
        limits = self._context.limits
        if not isinstance(call, ToolCall) or self._context.environments or call.tool not in limits.shared_tools:
            return None
        return history_digest([{"tool": call.tool, "arguments": dict(call.arguments), **self._session(node, call)}])

    async def _ask(self, node: Node, call: AnsweredCall, name: str | None) -> RecordedAnswer:
        """Return the result of a call that no equal one has executed, recorded before any path can act on it."""
        try:
            result = await self._send_call(node, call)
        except SandboxUnavailable as error:
            self.failed_calls[call.tool] = str(error)
            result = RecordedAnswer(np.zeros(0, np.int32), ToolRecord(call.tool, {}, FAILED_CALL, 0.0, False))
        result = replace(result, shared_as=name)
        self._add(node.key, result)
        return result

    async def _send_call(self, node: Node, call: AnsweredCall) -> RecordedAnswer:
        if not isinstance(call, ToolCall):
            ids = self._result_tokens(call.tool, call.result)
            return RecordedAnswer(ids, ToolRecord(call.tool, {}, call.status, 0.0, False))
        started = time.monotonic()
        if (environments := self._context.environments) is not None:
            action = str(call.arguments["action"])
            step = await environments.step(node, action)
            seen = self._result_tokens(call.tool, step.observation)
            seconds, state = time.monotonic() - started, environments.state_digest(node.key)
            return RecordedAnswer(seen, step_record(action, step, seconds, state))
        answer = await self._execute(node, call)
        ids = self._result_tokens(call.tool, answer.text)
        seconds = time.monotonic() - started
        record = ToolRecord(call.tool, dict(call.arguments), str(answer.status), seconds, answer.cached)
        return RecordedAnswer(ids, record)

    async def _execute(self, node: Node, call: ToolCall) -> ToolAnswer:
        """Return the answer of the tool service, or that of an equal call of the task to a deterministic tool."""
        limits = self._context.limits
        session, shared = self._session(node, call), call.tool in limits.deterministic_tools
        # The service lets a trajectory, and those below it, begin with its states: shared ones belong to the task.
        owner = () if session and shared else node.key

        async def execute() -> ToolAnswer:
            return await self._context.tools.call(
                call.tool,
                {**call.arguments, **session},
                trajectory_id="/".join([self._task_id, *map(str, owner)]),
                timeout_s=limits.tool_timeout_s,
                on_retry=self._count_retry,
            )

        if not shared:
            return await execute()
        key = f"{self._task_id} {self._executions[node.key]}"
        answer, hit = await self._context.tools.results.answer(key, execute)
        if not hit:
            return answer
        self.counts.seconds_saved += answer.seconds
        return replace(answer, cached=True)

    def _result_tokens(self, tool: str, text: str) -> Int32Array:
        """Return int32[n], the tokens of a result. Raises ToolTextError."""
        codec, limits = self._context.codec, self._context.limits
        try:
            ids = limits.protocol.result_frame().tokens(text, codec, limits.max_tool_tokens)
        except (TypeError, UnicodeError) as error:
            raise ToolTextError(f"cannot tokenize the answer of {tool}, {text[:80]!a}: {error}") from error
        return np.array(ids, dtype=np.int32)

    def _session(self, node: Node, call: ToolCall) -> dict[str, str]:
        """Return the names of the interpreter states before and after a python call; empty without sessions.

        They follow from path keys, or from the programs on the path if the tool is deterministic: then equal programs
        leave equal states. A program that has run into its time limit has left the state as it was, so it does not
        count; in another tree of the task the same program may leave another one.
        """
        limits = self._context.limits
        if not limits.sessions or call.tool != PYTHON:
            return {}
        task = f"{self._context.step}/{self._task_id}"
        before = node.callers(PYTHON, REFUSED)
        if PYTHON not in limits.deterministic_tools:
            names = ["/".join([task, *map(str, caller.key)]) for caller in (*before[:1], node)]
        else:
            tools = [each.children[0].tool for each in reversed(before)]
            programs = [tool.arguments for tool in tools if tool is not None and tool.status in SHARED_STATUSES]
            made = [programs, [*programs, call.arguments]] if programs else [[call.arguments]]
            names = [f"{task}/{history_digest(each)}" for each in made]
        return {"state": names[0] if len(names) > 1 else "", "keep": names[-1]}

    async def _ready(self, node: Node, prefix: Int32Array) -> None:
        if self._context.ready is not None:
            await self._context.ready()
        await self.prefixes.wait_until_cached(node, prefix)

    async def _prefill(self, prefix: Int32Array) -> None:
        engine, key = self._context.engine, self._routing_key
        self._add((), Prefill(*await engine.prefill(prefix, key=key, on_retry=self._count_retry)))

    def _add(self, key: PathKey, answer: Answer) -> None:
        self._count(answer)
        self._keep(key, answer)

    def _keep(self, key: PathKey, answer: Answer | FirstTokens) -> None:
        seconds = self.age_s
        self._record.add(key, answer, seconds)
        self._write(encode_entry(key, answer, seconds))

    def _count(self, answer: Answer) -> None:
        counts = self.counts
        if isinstance(answer, RecordedAnswer):
            status = answer.tool.status
            counts.calls_invalid += status == INVALID_CALL
            counts.calls_at_limit += status == LIMIT
            counts.calls_repeated += status == REPEATED
            counts.calls_failed += status == FAILED_CALL
            if status not in REFUSED:
                answered = status != FAILED_CALL
                counts.calls_executed += answered
                counts.calls_cached += answered and answer.tool.cached
                if not answer.tool.cached:
                    self.calls[answer.tool.name, answered] += 1
            return
        counts.requests += 1
        counts.prompt_tokens += answer.prompt_tokens
        counts.cached_tokens += answer.cached_tokens
        if isinstance(answer, Generation):
            counts.tokens_sampled += len(answer.token_ids)

    def _count_retry(self) -> None:
        self.counts.retries += 1


def _encoded(node: Node, previous: Sequence[Generation]) -> list[bytes]:
    above = [] if node.parent is None else node.parent.encoded_path()
    return above + [encode_ids(each.token_ids) for each in previous if len(each.token_ids)]
