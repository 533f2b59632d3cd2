"""What engine and tools answer one tree: asked for in turn, recorded and counted.

Every answer is recorded as it comes. A tree that is grown again from its record asks only for what is not there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from arpo_megatron.algorithms.branching import PathKey, path_seed
from arpo_megatron.engine.expert_routes import ExpertRouteRequest
from arpo_megatron.engine.request import Generation
from arpo_megatron.rollout.accounting import RolloutCounts
from arpo_megatron.rollout.context import RolloutContext, ToolTextError
from arpo_megatron.rollout.node import Node
from arpo_megatron.rollout.record import Answer, Answered, Prefilled, TreeRecord, packed
from arpo_megatron.rollout.shared_prefixes import SharedPrefixes
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tree import Int32Array, ToolRecord


class TreeAnswers:
    """Of one tree.

    Args:
        task_id: its task.
        context: what it shares with other trees.
        entries: of its record, if it was grown before.
        record: is called with each further entry.

    Attributes:
        counts: what the answers have cost so far, those of the record included.
        shared: which beginnings of the tree the engine's cache holds; whoever begins or ends a path says so there.
    """

    def __init__(
        self, task_id: str, context: RolloutContext, entries: Sequence[bytes], record: Callable[[bytes], None]
    ) -> None:
        self.counts = RolloutCounts()
        self.shared = SharedPrefixes(self._prefill, lambda: context.engine.cache_id(self._routing_key))
        self._record = TreeRecord.of(entries)
        self._write = record
        self._began = time.monotonic() - self._record.seconds
        for prefilled in self._record.prefilled:
            self._count(prefilled)
        self._task_id = task_id
        self._routing_key = f"{context.step}/{task_id}"  # a tree stays on one engine, which has its prefixes cached
        self._context = context

    @property
    def age_s(self) -> float:
        """Of the tree, in seconds, the time before it was grown again included."""
        return time.monotonic() - self._began

    def recorded(self, node: Node) -> Sequence[Generation]:
        """What the record holds of a MODEL segment, in order."""
        return self._record.sampled.get(node.key, [])

    async def sample(
        self, node: Node, prefix: Int32Array, parts: Sequence[Generation], max_new_tokens: int, routed: int
    ) -> Generation:
        """What the engine samples, or has sampled, behind the `parts` of a segment.

        Args:
            node: the segment.
            prefix: int32[n], all tokens before it.
            parts: what it has so far.
            max_new_tokens: at least 1.
            routed: tokens of the prefix whose routes other requests ask for.
        """
        recorded = self.recorded(node)
        if len(parts) < len(recorded):
            part = recorded[len(parts)]
            self._count(part)
            self.counts.tokens_recorded += len(part.token_ids)
            self._context.on_tokens(len(part.token_ids))
            return part
        context = self._context
        seed = path_seed(context.seed, context.step, self._task_id, node.key)
        tokens = np.concatenate([prefix, *(part.token_ids for part in parts)])
        start = len(tokens) - 1 if len(tokens) > len(prefix) else routed
        part = await context.engine.generate(
            tokens,
            max_new_tokens=max_new_tokens,
            sampling=replace(context.sampling, seed=seed),
            stop=context.limits.stops,
            key=self._routing_key,
            routes=None if context.routes is None else ExpertRouteRequest(start, context.routes),
            ready=partial(self._ready, node, prefix),
            on_retry=self._repeat,
        )
        self.shared.hold(node)
        self._note(node.key, part)
        context.on_tokens(len(part.token_ids))
        return part

    async def call(self, node: Node, call: protocol.ToolCall) -> Answered:
        """What comes, or came, of the call that has ended a segment."""
        answered = self._record.answered.get(node.key)
        if answered is None:
            answered = await self._called(node, call)
            self._note(node.key, answered)
        else:
            self._count(answered)
        return answered

    async def _called(self, node: Node, call: protocol.ToolCall) -> Answered:
        started, limits, codec = time.monotonic(), self._context.limits, self._context.codec
        session = self._session(node) if limits.sessions and call.tool == protocol.PYTHON else {}
        answer = await self._context.tools.call(
            call.tool,
            {**call.arguments, **session},
            trajectory_id="/".join([self._task_id, *map(str, node.key)]),
            timeout_s=limits.tool_timeout_s,
            on_retry=self._repeat,
        )
        try:
            result = protocol.result_tokens(
                answer.text, encode=codec.encode_plain, decode=codec.decode, max_tokens=limits.max_tool_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise ToolTextError(f"{call.tool} has answered {answer.text[:80]!a}: {error}") from error
        seconds = time.monotonic() - started
        record = ToolRecord(call.tool, dict(call.arguments), str(answer.status), seconds, answer.cached)
        return Answered(np.array(result, dtype=np.int32), record)

    def _session(self, node: Node) -> dict[str, str]:
        """Names of the states that a python call behind a segment begins with and leaves: those of places."""

        def name(place: Node) -> str:
            return "/".join(map(str, (self._context.step, self._task_id, *place.key)))

        before = node.caller(protocol.PYTHON)
        return {"state": "" if before is None else name(before), "keep": name(node)}

    async def _ready(self, node: Node, prefix: Int32Array) -> None:
        if self._context.ready is not None:
            await self._context.ready()
        await self.shared.ready(node, prefix)

    async def _prefill(self, prefix: Int32Array) -> None:
        engine, key = self._context.engine, self._routing_key
        self._note((), Prefilled(*await engine.prefill(prefix, key=key, on_retry=self._repeat)))

    def _repeat(self) -> None:
        self.counts.retries += 1

    def _note(self, key: PathKey, answer: Answer) -> None:
        """Count an answer, and keep it for whoever has to go on."""
        seconds = self.age_s
        self._count(answer)
        self._record.add(key, answer, seconds)
        self._write(packed(key, answer, seconds))

    def _count(self, answer: Answer) -> None:
        counts = self.counts
        if isinstance(answer, Answered):
            counts.calls_executed += 1
            counts.calls_cached += answer.tool.cached
            return
        counts.requests += 1
        counts.prompt_tokens += answer.prompt_tokens
        counts.cached_tokens += answer.cached_tokens
        if isinstance(answer, Generation):
            counts.tokens_sampled += len(answer.token_ids)
