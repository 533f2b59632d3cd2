"""Growing one tree: a coroutine for each of its paths, none of which waits for another.

A path samples a MODEL segment, has its tool call answered, and goes on below the TOOL segment. Behind a tool result
it samples the first k tokens by themselves, asks the policy, and forks if told so: siblings start from the tool
result at once, while the measured path goes on from its k tokens. The forks that a path has not used when it ends
become fresh trajectories at once.

What engine and tools answer is recorded as it comes (`record`); a tree that is grown again from its record asks only
for what is not there.

Nothing depends on which request came back first: places in the tree (`PathKey`) are handed out when a path begins, the
forks of a task are reserved by place (`policies.base.shares`), draws and the engine's seeds are keyed by place, and the
finished tree is written in the order of places.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np

from arpo_megatron.rollout import protocol
from arpo_megatron.rollout.accounting import GrowCounts
from arpo_megatron.rollout.client import EngineClient, EngineFinish, Generation, Sampling
from arpo_megatron.rollout.node import Node
from arpo_megatron.rollout.policies import BranchPolicy, ForkPoint, PathKey, fresh_place, place_seed, shares
from arpo_megatron.rollout.record import Answer, Answered, Prefilled, TreeRecord, packed
from arpo_megatron.rollout.routes import RouteRequest, RouteShape
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tree import Finish, Float32Array, Int32Array, Role, RolloutTree, ToolRecord


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a single token."""


class TextCodec(Protocol):
    """Text to token ids without special tokens added, and back with special tokens kept."""

    def encode(self, text: str) -> list[int]: ...  # noqa: D102

    def encode_plain(self, text: str) -> list[int]:
        """The same, but what spells a special token in the text becomes ordinary ones."""

    def decode(self, token_ids: Sequence[int]) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class GrowLimits:
    """Bounds of a trajectory (`config.RolloutConfig`), and `max_length`, those of prompt and response together.

    With `sessions` a python call begins with the state that the one before it on its path has left.
    """

    max_length: int
    max_response_tokens: int
    max_tool_calls: int
    max_tool_tokens: int
    tool_timeout_s: float
    stop_at_answer: bool = False
    sessions: bool = False


@dataclass(frozen=True, slots=True)
class GrowContext:
    """What all trees of one call share. `seed` is the run's; `sampling.seed` is replaced for every place.

    With `routes` the engine tells to which experts it sent each token.
    """

    engine: EngineClient
    tools: ToolClient
    codec: TextCodec
    policy: BranchPolicy
    sampling: Sampling
    limits: GrowLimits
    seed: int
    step: int
    on_tokens: Callable[[int], None]
    routes: RouteShape | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a MODEL segment begins.

    Attributes:
        node: the segment to fill.
        prefix: int32[n], all tokens before it.
        forks: how many the path may still take, its siblings' included.
        above: the TOOL segment it follows if a fork may be decided behind its first tokens, else None.
        start_entropies: those of the trajectory's first MODEL segment; None in that segment itself.
        before_entropies: those of the MODEL segment that made the call before; None in the first.
        calls: tool calls made before.
        routed: tokens of the prefix whose routes other requests ask for.
    """

    node: Node
    prefix: Int32Array
    forks: int
    above: Node | None = None
    start_entropies: Float32Array | None = None
    before_entropies: Float32Array | None = None
    calls: int = 0
    routed: int = 0


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A MODEL segment that has ended.

    Attributes:
        node: its last piece; there are several only where weight pushes fell into it.
        prefix: int32[n], all tokens up to its end.
        forks: how many the path may still take.
        start_entropies: those of the trajectory's first MODEL segment.
        entropies: its own.
        calls: tool calls made before.
        call: the one that ended it; None where the trajectory ends.
    """

    node: Node
    prefix: Int32Array
    forks: int
    start_entropies: Float32Array
    entropies: Float32Array
    calls: int
    call: protocol.ToolCall | None


class TreeGrower:
    """Grows one tree; `counts` says what it has cost so far, also when `grow` raises.

    Args:
        task_id: its task.
        prompt_ids: int32[n].
        context: what it shares with other trees.
        entries: of its record, if it was grown before.
        record: is called with each further entry.
    """

    def __init__(
        self,
        task_id: str,
        prompt_ids: Int32Array,
        context: GrowContext,
        *,
        entries: Sequence[bytes] = (),
        record: Callable[[bytes], None] = lambda _entry: None,
    ) -> None:
        self.counts = GrowCounts()
        self._record = TreeRecord.of(entries)
        self._write = record
        self._began = time.monotonic() - self._record.seconds
        for prefilled in self._record.prefilled:
            self._count(prefilled)
        self._task_id = task_id
        self._routing_key = f"{context.step}/{task_id}"  # a tree stays on one engine, which has its prefixes cached
        self._context = context
        self._root = Node(Role.PROMPT, (), prompt_ids)
        limits = context.limits
        self._stops = (*protocol.STOP_STRINGS, *([protocol.ANSWER_STOP] if limits.stop_at_answer else []))
        self._longest = min(limits.max_length, len(prompt_ids) + limits.max_response_tokens)
        self._paths = asyncio.TaskGroup()

    async def grow(self) -> RolloutTree:
        """Sample all trajectories of the task.

        Raises:
            PromptTooLongError: nothing can be sampled.
            EngineUnavailableError, EngineRefusedError, SandboxError: the tree cannot be finished.
        """
        prompt = self._root.token_ids
        if len(prompt) >= self._longest:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens of max_length={self._context.limits.max_length}"
            )
        policy = self._context.policy
        if policy.initial > 1 and not all((number,) in self._record.sampled for number in range(policy.initial)):
            # Else they would all compute the prompt.
            self._note((), Prefilled(*await self._context.engine.prefill(prompt, key=self._routing_key)))
        try:
            async with self._paths:
                for number, forks in enumerate(shares(policy.total - policy.initial, policy.initial)):
                    self._start(
                        _Place(self._root.child(Role.MODEL), prompt, forks, routed=len(prompt) if number else 0)
                    )
        except BaseExceptionGroup as errors:  # the first error of a path has ended the others
            raise _first_leaf(errors) from None
        return self._tree(time.monotonic() - self._began)

    def so_far(self) -> RolloutTree:
        """What was sampled of a tree whose `grow` has raised or was cancelled."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            for child in list(node.children):
                if child.role is Role.MODEL and not len(child.token_ids):
                    if parts := self._record.sampled.get(child.key, []):
                        self._fill(child, parts)
                    else:
                        node.children.remove(child)
            pending += node.children
        return self._tree(time.monotonic() - self._began)

    def _start(self, place: _Place) -> None:
        self._paths.create_task(self._run_path(place))

    async def _run_path(self, place: _Place) -> None:
        """Alternate between model and tool until the trajectory ends; what it did not fork begins afresh."""
        next_place: _Place | None = place
        while next_place is not None:
            segment = await self._sample_segment(next_place)
            next_place = await self._answer(segment) if segment.call is not None else None
        for number in range(segment.forks):
            key = fresh_place(self._context.policy.initial, segment.node.key, number)
            node = Node(Role.MODEL, key, above=self._root)
            self._root.children.append(node)
            self._start(_Place(node, self._root.token_ids, 0, routed=len(self._root.token_ids)))

    async def _sample_segment(self, place: _Place) -> "_Sampled":
        """Fill the segment at `place`, asking the policy for forks behind its first tokens where it is measured."""
        room = self._longest - len(place.prefix)
        measured = self._context.policy.measured_tokens if place.above is not None and place.forks > 0 else 0
        parts: list[Generation] = []
        forks = place.forks
        matched = await self._extend(place, parts, min(room, measured) if measured else room)
        if measured:
            forks = self._decide(place, np.concatenate([part.entropies for part in parts])[:measured])
            matched = await self._extend(place, parts, room)
        last = self._fill(place.node, parts)
        ids = np.concatenate([part.token_ids for part in parts])
        last.finish, call = self._outcome(place, parts[-1].finish, matched, ids)
        entropies = np.concatenate([part.entropies for part in parts])
        start = entropies if place.start_entropies is None else place.start_entropies
        return _Sampled(last, np.concatenate([place.prefix, ids]), forks, start, entropies, place.calls, call)

    async def _extend(self, place: _Place, parts: list[Generation], tokens: int) -> str | None:
        """Sample until the segment has `tokens` tokens or the model stops; returns the stop string where one ended it.

        More than one request is needed where weight pushes cut one short. The engine looks for stop strings in the
        tokens of one request only: behind tokens that end within a tag, they are sampled one by one until the tag is
        whole or broken off, also beyond `tokens`. (Where the tags are single tokens that does not happen.)
        """
        room = self._longest - len(place.prefix)
        while True:
            if parts and (parts[-1].matched is not None or parts[-1].finish is EngineFinish.END_TOKEN):
                return parts[-1].matched
            ids = np.concatenate([place.prefix[:0], *(part.token_ids for part in parts)])
            text = self._context.codec.decode(ids.tolist()) if parts else ""
            if len(parts) > 1 and (matched := protocol.find_stop(text, self._stops)) is not None:
                return matched
            wanted = 1 if protocol.ends_inside_stop(text, self._stops) else tokens - len(ids)
            if wanted <= 0 or len(ids) >= room:
                return None
            parts.append(await self._next_part(place, parts, ids, wanted))

    def _decide(self, place: _Place, entropies: Float32Array) -> int:
        """Ask the policy, and start the siblings it wants from the tool result; returns the forks the path keeps."""
        above = place.above
        if above is None or place.start_entropies is None or place.before_entropies is None:
            raise AssertionError("only a segment behind a tool result is measured")
        decision = self._context.policy.decide(
            ForkPoint(
                task_id=self._task_id,
                step=self._context.step,
                path=place.node.key,
                start_entropies=place.start_entropies,
                before_entropies=place.before_entropies,
                entropies=entropies,
                budget=place.forks,
            )
        )
        place.node.branch = decision.record
        kept, *given = shares(place.forks - decision.siblings, 1 + decision.siblings)
        for forks in given:
            sibling = above.child(Role.MODEL)
            self._start(replace(place, node=sibling, forks=forks, above=None, routed=len(place.prefix)))
        return kept

    def _fill(self, node: Node, parts: Sequence[Generation]) -> Node:
        """Write what was sampled to `node`, and below it what later policies added; returns the last segment."""
        end = node.path_length()
        for version, group in groupby(parts, key=lambda part: part.weight_version):
            same = list(group)
            if len(node.token_ids):
                node = node.continuation()
            node.token_ids = np.concatenate([part.token_ids for part in same])
            node.logprobs = np.concatenate([part.logprobs for part in same])
            node.entropies = np.concatenate([part.entropies for part in same])
            node.policy_version = version
        for part in parts:
            end += len(part.token_ids)
            if part.routes is not None:
                node.keep_routes(end - 1, part.routes)
        return node

    def _outcome(
        self, place: _Place, finish: EngineFinish, matched: str | None, ids: Int32Array
    ) -> tuple[Finish, protocol.ToolCall | None]:
        """What the end of a generation means for the trajectory."""
        if matched is None:
            return (Finish.END if finish is EngineFinish.END_TOKEN else Finish.LENGTH), None
        if matched == protocol.ANSWER_STOP:
            return Finish.END, None
        call = protocol.parse_call(self._context.codec.decode(ids.tolist()), matched)
        if isinstance(call, protocol.Malformed):
            return Finish.MALFORMED, None
        if place.calls >= self._context.limits.max_tool_calls:
            return Finish.CALL_LIMIT, None
        return Finish.TOOL_CALL, call

    async def _answer(self, segment: "_Sampled") -> _Place | None:
        """Have a call answered and add the TOOL segment; returns where the path goes on.

        An answer that leaves no room for another model token is not added: the trajectory ends with the call, by
        length.
        """
        node, call = segment.node, segment.call
        if call is None:
            raise AssertionError("there is no call to answer")
        answered = self._record.answered.get(node.key)
        if answered is None:
            answered = await self._call(node, call)
            self._note(node.key, answered)
        else:
            self._count(answered)
        prefix = np.concatenate([segment.prefix, answered.token_ids])
        if len(prefix) >= self._longest:
            node.finish = Finish.LENGTH
            return None
        tool = node.child(Role.TOOL)
        tool.token_ids, tool.tool = answered.token_ids, answered.tool
        return _Place(
            tool.child(Role.MODEL),
            prefix,
            segment.forks,
            above=tool,
            start_entropies=segment.start_entropies,
            before_entropies=segment.entropies,
            calls=segment.calls + 1,
            routed=len(segment.prefix) - 1,
        )

    def _session(self, node: Node) -> dict[str, str]:
        """Names of the states that a python call behind a segment begins with and leaves: those of places."""

        def name(place: Node) -> str:
            return "/".join(map(str, (self._context.step, self._task_id, *place.key)))

        before = node.caller(protocol.PYTHON)
        return {"state": "" if before is None else name(before), "keep": name(node)}

    async def _call(self, node: Node, call: protocol.ToolCall) -> Answered:
        started, limits, codec = time.monotonic(), self._context.limits, self._context.codec
        session = self._session(node) if limits.sessions and call.tool == protocol.PYTHON else {}
        answer = await self._context.tools.call(
            call.tool,
            {**call.arguments, **session},
            trajectory_id="/".join([self._task_id, *map(str, node.key)]),
            timeout_s=limits.tool_timeout_s,
        )
        result = protocol.result_tokens(
            answer.text, encode=codec.encode_plain, decode=codec.decode, max_tokens=limits.max_tool_tokens
        )
        seconds = time.monotonic() - started
        record = ToolRecord(call.tool, dict(call.arguments), str(answer.status), seconds, answer.cached)
        return Answered(np.array(result, dtype=np.int32), record)

    async def _next_part(
        self, place: _Place, parts: Sequence[Generation], sampled: Int32Array, max_new_tokens: int
    ) -> Generation:
        """What the engine samples, or has sampled, behind the `parts` of a segment."""
        recorded = self._record.sampled.get(place.node.key, [])
        if len(parts) < len(recorded):
            part = recorded[len(parts)]
            self._count(part)
            self._context.on_tokens(len(part.token_ids))
            return part
        context = self._context
        seed = place_seed(context.seed, context.step, self._task_id, place.node.key)
        prefix = np.concatenate([place.prefix, sampled])
        start = len(prefix) - 1 if len(sampled) else place.routed
        part = await context.engine.generate(
            prefix,
            max_new_tokens=max_new_tokens,
            sampling=replace(context.sampling, seed=seed),
            stop=self._stops,
            key=self._routing_key,
            routes=None if context.routes is None else RouteRequest(start, context.routes),
        )
        self._note(place.node.key, part)
        context.on_tokens(len(part.token_ids))
        return part

    def _note(self, key: PathKey, answer: Answer) -> None:
        """Count an answer, and keep it for whoever has to go on."""
        seconds = time.monotonic() - self._began
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

    def _tree(self, seconds: float) -> RolloutTree:
        """The finished tree, depth first in the order of places."""
        self._root.children.sort(key=lambda node: node.key)
        root = self._root
        tree = RolloutTree(self._task_id, root.token_ids, routes=root.routes, step=self._context.step, seconds=seconds)
        pending = [(0, child) for child in reversed(self._root.children)]
        while pending:
            parent, node = pending.pop()
            index = tree.add(
                parent,
                node.role,
                node.token_ids,
                logprobs=node.logprobs,
                entropies=node.entropies,
                policy_version=node.policy_version,
                finish=node.finish,
                branch=node.branch,
                tool=node.tool,
                routes=node.routes,
            )
            pending += [(index, child) for child in reversed(node.children)]
        return tree


def _first_leaf(error: BaseException) -> BaseException:
    """The first plain exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
