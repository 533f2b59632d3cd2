"""Growing one tree: a coroutine for each of its paths, none of which waits for another.

A path samples a MODEL segment, has its tool call answered, and goes on below the TOOL segment. Behind a tool result
it samples the first k tokens by themselves, asks the policy, and forks if told so: siblings start from the tool
result at once, while the measured path goes on from its k tokens. The forks that a path has not used when it ends
become fresh trajectories at once.

What engine and tools answer is asked for, recorded and counted in `answers`.

Nothing depends on which request came back first: places in the tree (`PathKey`) are handed out when a path begins, the
forks of a task are reserved by place (`split_budget`), draws and the engine's seeds are keyed by place, and the
finished tree is written in the order of places.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from arpo_megatron.algorithms.branching import (
    ForkPoint,
    Probe,
    ProbingPolicy,
    fresh_path_key,
    initial_budgets,
    split_budget,
)
from arpo_megatron.engine.request import EngineFinish, Generation
from arpo_megatron.rollout.answers import TreeAnswers
from arpo_megatron.rollout.context import PromptTooLongError, RolloutContext
from arpo_megatron.rollout.node import Node
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tree import Finish, Float32Array, Int32Array, Role, RolloutTree


@dataclass(frozen=True, slots=True)
class BranchStart:
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
        streak: fork points of the path before it that have forked in a row.
    """

    node: Node
    prefix: Int32Array
    forks: int
    above: Node | None = None
    start_entropies: Float32Array | None = None
    before_entropies: Float32Array | None = None
    calls: int = 0
    routed: int = 0
    streak: int = 0


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
        streak: fork points of the path up to it that have forked in a row.
    """

    node: Node
    prefix: Int32Array
    forks: int
    start_entropies: Float32Array
    entropies: Float32Array
    calls: int
    call: protocol.ToolCall | None
    streak: int


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
        context: RolloutContext,
        *,
        entries: Sequence[bytes] = (),
        record: Callable[[bytes], None] = lambda _entry: None,
    ) -> None:
        self._answers = TreeAnswers(task_id, context, entries, record)
        self.counts = self._answers.counts
        self._shared = self._answers.shared
        self._task_id = task_id
        self._context = context
        self._root = Node(Role.PROMPT, (), prompt_ids)
        limits = context.limits
        self._longest = min(limits.max_length, len(prompt_ids) + limits.max_response_tokens)
        self._paths = asyncio.TaskGroup()
        self._initial = context.policy.initial

    @property
    def prompt(self) -> Int32Array:
        """int32[n]."""
        return self._root.token_ids

    async def grow(self) -> RolloutTree:
        """Sample all trajectories of the task.

        Raises:
            PromptTooLongError: nothing can be sampled.
            EngineUnavailableError, EngineRefusedError, SandboxError, ToolTextError: the tree cannot be finished.
        """
        if len(self.prompt) >= self._longest:
            raise PromptTooLongError(
                f"the prompt has {len(self.prompt)} tokens of max_length={self._context.limits.max_length}"
            )
        policy = self._context.policy
        if isinstance(policy, ProbingPolicy):
            return await self._grow(self._probe(policy))
        return await self._grow(self._begin(policy.initial, 0))

    async def _grow(self, beginning: Coroutine[Any, Any, None]) -> RolloutTree:
        try:
            async with self._paths:
                self._paths.create_task(beginning)
        except BaseExceptionGroup as errors:  # the first error of a path has ended the others
            raise _first_leaf(errors) from None
        return self._tree()

    def partial_tree(self) -> RolloutTree:
        """What was sampled of a tree whose `grow` has raised or was cancelled."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            for child in list(node.children):
                if child.role is Role.MODEL and not len(child.token_ids):
                    if parts := self._answers.recorded(child):
                        self._fill(child, parts)
                    else:
                        node.children.remove(child)
            pending += node.children
        return self._tree()

    async def _probe(self, policy: ProbingPolicy) -> None:
        """Finish a first trajectory, and start as many others as the policy makes of it."""
        node = self._root.child(Role.MODEL)
        self._shared.add_path(node)
        first, *others = await self._run_path(BranchStart(node, self._root.token_ids, 0))
        await self._begin(policy.plan(Probe(first, tuple(others))), 1)

    async def _begin(self, initial: int, begun: int) -> None:
        """Start the trajectories of the N first ones that have not begun."""
        self._initial, prompt = initial, self._root.token_ids
        for number, forks in list(enumerate(initial_budgets(self._context.policy, initial)))[begun:]:
            self._start(BranchStart(self._root.child(Role.MODEL), prompt, forks, routed=len(prompt) if number else 0))

    def _start(self, place: BranchStart) -> None:
        self._shared.add_path(place.node)
        self._paths.create_task(self._run_path(place))

    async def _run_path(self, place: BranchStart) -> list[Float32Array]:
        """Alternate between model and tool until the trajectory ends; what it did not fork begins afresh.

        Returns the entropies of its MODEL segments.
        """
        entropies = []
        next_place: BranchStart | None = place
        while next_place is not None:
            segment = await self._sample_segment(next_place)
            entropies.append(segment.entropies)
            next_place = await self._answer(segment) if segment.call is not None else None
        self._shared.end_path(segment.node)
        for number in range(segment.forks):
            key = fresh_path_key(self._initial, segment.node.key, number)
            node = Node(Role.MODEL, key, above=self._root)
            self._root.children.append(node)
            self._start(BranchStart(node, self._root.token_ids, 0, routed=len(self._root.token_ids)))
        return entropies

    async def _sample_segment(self, place: BranchStart) -> "_Sampled":
        """Fill the segment at `place`, asking the policy for forks behind its first tokens where it is measured."""
        room = self._longest - len(place.prefix)
        measured = self._context.policy.measured_tokens if place.above is not None and place.forks > 0 else 0
        parts: list[Generation] = []
        forks, streak = place.forks, place.streak
        matched = await self._extend(place, parts, min(room, measured) if measured else room)
        if measured:
            forks, streak = self._decide(place, np.concatenate([part.entropies for part in parts])[:measured])
            matched = await self._extend(place, parts, room)
        last = self._fill(place.node, parts)
        ids = np.concatenate([part.token_ids for part in parts])
        last.finish, call = self._outcome(place, parts[-1].finish, matched, ids)
        entropies = np.concatenate([part.entropies for part in parts])
        start = entropies if place.start_entropies is None else place.start_entropies
        return _Sampled(last, np.concatenate([place.prefix, ids]), forks, start, entropies, place.calls, call, streak)

    async def _extend(self, place: BranchStart, parts: list[Generation], tokens: int) -> str | None:
        """Sample until the segment has `tokens` tokens or the model stops; returns the stop string where one ended it.

        More than one request is needed where weight pushes cut one short. The engine looks for stop strings in the
        tokens of one request only: behind tokens that end within a tag, they are sampled one by one until the tag is
        whole or broken off, also beyond `tokens`. (Where the tags are single tokens that does not happen.)
        """
        room, stops = self._longest - len(place.prefix), self._context.limits.stops
        while True:
            if parts and (parts[-1].matched is not None or parts[-1].finish is EngineFinish.END_TOKEN):
                return parts[-1].matched
            ids = np.concatenate([place.prefix[:0], *(part.token_ids for part in parts)])
            text = self._context.codec.decode(ids.tolist()) if parts else ""
            if len(parts) > 1 and (matched := protocol.find_stop(text, stops)) is not None:
                return matched
            wanted = 1 if protocol.ends_inside_stop(text, stops) else tokens - len(ids)
            if wanted <= 0 or len(ids) >= room:
                return None
            parts.append(await self._answers.sample(place.node, place.prefix, parts, wanted, place.routed))

    def _decide(self, place: BranchStart, entropies: Float32Array) -> tuple[int, int]:
        """Ask the policy, and start the siblings it wants from the tool result.

        Returns the forks that the path keeps, and how many of its fork points up to this one have forked in a row.
        """
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
                streak=place.streak,
            )
        )
        place.node.branch = decision.record
        streak = place.streak + 1 if decision.siblings else 0
        kept, *given = split_budget(place.forks - decision.siblings, 1 + decision.siblings)
        for forks in given:
            sibling = above.child(Role.MODEL)
            self._start(replace(place, node=sibling, forks=forks, above=None, routed=len(place.prefix), streak=streak))
        return kept, streak

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
        self, place: BranchStart, finish: EngineFinish, matched: str | None, ids: Int32Array
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

    async def _answer(self, segment: "_Sampled") -> BranchStart | None:
        """Have a call answered and add the TOOL segment; returns where the path goes on.

        An answer that leaves no room for another model token is not added: the trajectory ends with the call, by
        length.
        """
        node, call = segment.node, segment.call
        if call is None:
            raise AssertionError("there is no call to answer")
        answered = await self._answers.call(node, call)
        prefix = np.concatenate([segment.prefix, answered.token_ids])
        if len(prefix) >= self._longest:
            node.finish = Finish.LENGTH
            return None
        tool = node.child(Role.TOOL)
        tool.token_ids, tool.tool = answered.token_ids, answered.tool
        self._shared.extend_path(tool)
        return BranchStart(
            tool.child(Role.MODEL),
            prefix,
            segment.forks,
            above=tool,
            start_entropies=segment.start_entropies,
            before_entropies=segment.entropies,
            calls=segment.calls + 1,
            routed=len(segment.prefix) - 1,
            streak=segment.streak,
        )

    def _tree(self) -> RolloutTree:
        """What has grown, depth first in the order of places."""
        self._root.children.sort(key=lambda node: node.key)
        root, step, seconds = self._root, self._context.step, self._answers.age_s
        tree = RolloutTree(self._task_id, root.token_ids, routes=root.routes, step=step, seconds=seconds)
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
