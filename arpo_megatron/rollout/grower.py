"""Grows one tree with one coroutine per path. No path waits for another.

A path alternates between the model and its tools until the trajectory ends:

    sample a segment -> call the tool -> sample k tokens -> decide -> sample the rest -> call the tool -> ... -> end
                                                              |
                                                              +-> siblings start from the tool result

- After a tool result, the branch policy decides with the entropies of the first k tokens whether to fork, while the
  engine samples the rest of the segment. (If it cannot stream entropies, these k tokens are a request of their own.)
  Siblings start when the fork budget (`branching/budget.py`) grants them.
- Forks that no path has used become fresh trajectories from the prompt.
- A path whose tool call fails, also when repeated, is lost (`lost_branches`).

The tree is a function of its prompt, the answers of engine and tools, and the seed. It does not depend on which request
came back first:

- A path gets its key (`PathKey`) when it starts.
- The fork budget grants forks by path keys, not by the time of an answer.
- Draws of the policy and seeds of the engine follow from the path key.
- The finished tree lists siblings in the order of their keys.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from arpo_megatron.algorithms.branching import (
    ForkPoint,
    Grant,
    PathForks,
    PathKey,
    Probe,
    ProbingPolicy,
    make_fork_budget,
)
from arpo_megatron.engine.request import EngineFinish, Generation
from arpo_megatron.errors import first_error
from arpo_megatron.rollout.context import PromptTooLongError, RolloutContext
from arpo_megatron.rollout.environments import ends_trajectory, rewards_of
from arpo_megatron.rollout.limits import NO_CALLS, AnsweredCall, CallHistory
from arpo_megatron.rollout.lost_branches import (
    AllBranchesLostError,
    lost_message,
    needed_calls,
    without_lost_branches,
)
from arpo_megatron.rollout.node import Node, build_tree
from arpo_megatron.rollout.tree_client import TreeClient
from arpo_megatron.tasks.tags.calls import ends_inside_stop, find_stop
from arpo_megatron.tree import FAILED_CALL, Finish, Float32Array, Int32Array, Role, RolloutTree


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The start of a MODEL segment."""

    node: Node
    """The empty segment."""
    prefix: Int32Array
    """int32[n], all tokens before it."""
    forks: PathForks
    """The path's part in the fork budget."""
    tool: Node | None = None
    """The TOOL segment before it, if the policy may fork there; None for the first segment of a path."""
    start_entropies: Float32Array | None = None
    """Entropies of the trajectory's first MODEL segment; None in that segment."""
    before_entropies: Float32Array | None = None
    """Entropies of the MODEL segment before the tool result; None in the first segment."""
    history: CallHistory = NO_CALLS
    """Tool calls on the path so far."""
    known_routes: int = 0
    """Number of prefix tokens whose expert routes other requests return."""


@dataclass(frozen=True, slots=True)
class _SampledSegment:
    """A MODEL segment that has ended."""

    node: Node
    """The last of its nodes: it has one for each policy version that sampled it."""
    prefix: Int32Array
    """int32[n], all tokens up to its end."""
    forks: PathForks
    start_entropies: Float32Array
    entropies: Float32Array
    history: CallHistory
    call: AnsweredCall | None
    """The call that ended it; None if the trajectory ends."""


class TreeGrower:
    """Grows one tree. `counts`, `calls` and `failed_calls` are up to date, also after `grow` has raised.

    Args:
        task_id: the tree's task.
        prompt_ids: int32[n].
        context: what the tree shares with others.
        entries: the tree's record, if it was grown before.
        record: called with each new entry of the record.
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
        self._client = TreeClient(task_id, context, entries, record)
        self.counts = self._client.counts
        self.calls, self.failed_calls = self._client.calls, self._client.failed_calls
        self.task_id = task_id
        """Id of the tree's task."""
        self._context = context
        self.admission, self.streams = context.admission, self._client.streams
        self._root = Node(Role.PROMPT, (), prompt_ids)
        limits = context.limits
        self._max_length = min(limits.max_length, len(prompt_ids) + limits.max_response_tokens)
        self._paths = asyncio.TaskGroup()
        self._forks = make_fork_budget(context.policy)
        self._measured: dict[PathKey, BranchStart] = {}  # fork points that are not decided yet
        self._lost = 0  # planned trajectories that failed tool calls have cost

    @property
    def prompt(self) -> Int32Array:
        """int32[n], the tokens of the prompt."""
        return self._root.token_ids

    async def grow(self) -> RolloutTree:
        """Sample all trajectories of the task.

        Raises:
            PromptTooLongError: there is no room for a single token.
            EngineUnavailableError, EngineRefusedError, SandboxError, ToolTextError: the tree cannot be finished.
            AllBranchesLostError: failed tool calls have ended every path.
        """
        if len(self.prompt) >= self._max_length:
            limit = self._context.limits.max_length
            raise PromptTooLongError(f"the prompt has {len(self.prompt)} of model.max_length={limit} tokens")
        policy = self._context.policy
        if isinstance(policy, ProbingPolicy):
            return await self._run(self._probe_and_start(policy))
        return await self._run(self._start_initial(policy.initial))

    def partial_tree(self) -> RolloutTree:
        """Return what was sampled, after `grow` has raised or was cancelled."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            for child in list(node.children):
                if child.role is Role.MODEL and not len(child.token_ids):
                    if generations := self._client.recorded(child):
                        self._write_segment(child, generations)
                    else:
                        node.children.remove(child)
            pending += node.children
        return self._build_tree()

    async def _run(self, first: Coroutine[Any, Any, None]) -> RolloutTree:
        """Run `first` and all paths that it starts. The first error of a path cancels the others."""
        try:
            async with self._paths:
                self._paths.create_task(first)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        tree = self._build_tree()
        return without_lost_branches(tree, self._lost, self.failed_calls) if self._lost else tree

    async def _probe_and_start(self, policy: ProbingPolicy) -> None:
        """Finish one trajectory, let the policy choose the number of initial ones, and start the rest of them."""
        node = self._root.add_child(Role.MODEL)
        self._client.add_path(node)
        first, *after_tools = await self._run_path(BranchStart(node, self.prompt, PathForks()))
        if self._lost:
            raise AllBranchesLostError(lost_message(self.failed_calls))
        await self._start_initial(policy.plan(Probe(first, tuple(after_tools))), started=1)

    async def _start_initial(self, initial: int, *, started: int = 0) -> None:
        """Start the initial trajectories, of which `started` run already."""
        for index, forks in enumerate(self._forks.start(initial, started=started), start=started):
            node = self._root.add_child(Role.MODEL)
            self._start_path(BranchStart(node, self.prompt, forks, known_routes=len(self.prompt) if index else 0))

    def _start_path(self, start: BranchStart) -> None:
        self._client.add_path(start.node)
        self._paths.create_task(self._run_path(start))

    async def _run_path(self, start: BranchStart) -> list[Float32Array]:
        """Alternate between model and tools until the trajectory ends; return the entropies of its MODEL segments."""
        entropies = []
        next_start: BranchStart | None = start
        while next_start is not None:
            segment = await self._sample_segment(next_start)
            entropies.append(segment.entropies)
            next_start = None if segment.call is None else await self._call_tool(segment, segment.call)
        self._client.end_path(segment.node)
        self._end_path(segment)
        return entropies

    def _end_path(self, segment: _SampledSegment) -> None:
        """Start the siblings and the fresh trajectories that the end of a path makes possible."""
        failed = bool(segment.node.children)  # the failed call
        end = self._forks.end(segment.forks, segment.node.key, failed=failed)
        self._lost += end.lost
        self._start_siblings(end.grants)
        for key, forks in end.fresh:
            node = Node(Role.MODEL, key, parent=self._root)
            self._root.children.append(node)
            self._start_path(BranchStart(node, self.prompt, forks, known_routes=len(self.prompt)))

    async def _sample_segment(self, start: BranchStart) -> _SampledSegment:
        """Sample a MODEL segment. After a tool result, decide on a fork once k tokens are there."""
        room = self._room(start)
        asks = start.tool is not None and self._forks.may_fork(start.forks)
        measured = self._context.policy.measured_tokens if asks else 0
        generations: list[Generation] = []
        if measured and not self._client.streams:
            await self._extend(start, generations, min(room, measured))
            self._measure(start, _entropies(generations)[:measured])
            measured = 0
        matched = await self._extend(start, generations, room, measured)

        last = self._write_segment(start.node, generations)
        ids, entropies = np.concatenate([each.token_ids for each in generations]), _entropies(generations)
        text = self._context.codec.decode((ids[:-1] if matched is None else ids).tolist())
        left = self._max_length - len(start.prefix) - len(ids)
        turn = await self._context.limits.read_turn(text, generations[-1].finish, matched, start.history, left)
        last.finish = turn.finish
        first = entropies if start.start_entropies is None else start.start_entropies
        prefix = np.concatenate([start.prefix, ids])
        return _SampledSegment(last, prefix, start.forks, first, entropies, turn.history, turn.call)

    async def _extend(
        self, start: BranchStart, generations: list[Generation], tokens: int, measured: int = 0
    ) -> str | None:
        """Sample until the segment has `tokens` tokens or the model stops; return the stop string that it ended with.

        With `measured` tokens, or when the model stops, the fork decision is taken; meanwhile the engine continues.

        A weight push cuts a request short, so this may take several requests. The engine searches stop strings in the
        tokens of one request only. If the tokens so far end inside a tag, the next ones are sampled one at a time until
        the tag is complete or broken off, even beyond `tokens`. (This does not happen if each tag is a single token.)
        """
        room, stops = self._room(start), self._context.limits.stops
        decided = not measured

        def decide(first: Sequence[Generation]) -> None:
            nonlocal decided
            decided = True
            self._measure(start, _entropies(first)[:measured])

        while True:
            ids = np.concatenate([start.prefix[:0], *(each.token_ids for each in generations)])
            text = self._context.codec.decode(ids.tolist()) if generations else ""
            missing = 1 if ends_inside_stop(text, stops) else tokens - len(ids)
            matched = generations[-1].matched if generations else None
            ended = matched is not None or bool(generations and generations[-1].finish is EngineFinish.END_TOKEN)
            if not ended and len(generations) > 1:
                matched = find_stop(text, stops)
            ended = ended or matched is not None or missing <= 0 or len(ids) >= room
            if not decided and (ended or len(ids) >= measured):
                decide(generations)
            if ended:
                return matched
            need = measured - len(ids)
            first = None if decided or missing <= need else (need, lambda part: decide([*generations, part]))
            generations.append(
                await self._client.sample(start.node, start.prefix, generations, missing, start.known_routes, first)
            )

    def _room(self, start: BranchStart) -> int:
        """Return the number of tokens that a MODEL segment may have."""
        room, turn = self._max_length - len(start.prefix), self._context.limits.max_turn_tokens
        return room if turn is None else min(room, turn)

    def _measure(self, start: BranchStart, entropies: Float32Array) -> None:
        """Add a measured fork point to the budget, and start the siblings that it grants, here or at earlier points."""
        if start.start_entropies is None or start.before_entropies is None:
            raise AssertionError("only a segment after a tool result is measured")
        self._measured[start.node.key] = start
        point = ForkPoint(
            task_id=self.task_id,
            step=self._context.step,
            path=start.node.key,
            start_entropies=start.start_entropies,
            before_entropies=start.before_entropies,
            entropies=entropies,
        )
        self._start_siblings(self._forks.measure(start.forks, point))

    def _start_siblings(self, grants: Sequence[Grant]) -> None:
        """Record decisions about fork points and start the paths that they grant."""
        for grant in grants:
            start = self._measured.pop(grant.path)
            start.node.branch = grant.decision.record
            if start.tool is None:
                raise AssertionError("only a segment after a tool result is measured")
            for forks in grant.siblings:
                node, known = start.tool.add_child(Role.MODEL), len(start.prefix)
                self._start_path(replace(start, node=node, forks=forks, tool=None, known_routes=known))

    def _write_segment(self, node: Node, generations: Sequence[Generation]) -> Node:
        """Write a segment to `node`, with a continuation for each newer policy version; return the last node."""
        end, done = node.path_length(), 0
        for version, group in groupby(generations, key=lambda each: each.weight_version):
            same = list(group)
            done += len(same)
            if len(node.token_ids):
                node = node.add_continuation()
            node.token_ids = np.concatenate([each.token_ids for each in same])
            node.logprobs = np.concatenate([each.logprobs for each in same])
            node.entropies = _entropies(same)
            node.policy_version = version
            node.ended_s = self._client.sampled_s(node, done - 1)
        for each in generations:
            end += len(each.token_ids)
            if each.routes is not None:
                node.store_routes(end - 1, each.routes)
        return node

    async def _call_tool(self, segment: _SampledSegment, call: AnsweredCall) -> BranchStart | None:
        """Call the tool and add the TOOL segment; return the start of the next MODEL segment, None if the path ends.

        If the result leaves no room for another token, it is not added: the trajectory ends with the call.
        """
        result = await self._client.call_tool(segment.node, call)
        if result.tool.status == FAILED_CALL:
            segment.node.add_child(Role.TOOL).tool = result.tool
            return None
        segment.node.rewards = rewards_of(result.tool)
        if ends_trajectory(result.tool):
            segment.node.finish = Finish.END
            return None
        prefix = np.concatenate([segment.prefix, result.token_ids])
        if len(prefix) >= self._max_length:
            segment.node.finish = Finish.LENGTH
            return None
        tool = segment.node.add_child(Role.TOOL)
        tool.token_ids, tool.tool = result.token_ids, result.tool
        tool.ended_s = self._client.answered_s(segment.node)
        self._client.extend_path(tool)
        return BranchStart(
            tool.add_child(Role.MODEL),
            prefix,
            segment.forks,
            tool=tool,
            start_entropies=segment.start_entropies,
            before_entropies=segment.entropies,
            history=segment.history,
            known_routes=len(segment.prefix) - 1,
        )

    def _build_tree(self) -> RolloutTree:
        tree, keys = build_tree(self._root, self.task_id, step=self._context.step, seconds=self._client.age_s)
        probed = isinstance(self._context.policy, ProbingPolicy)
        tree.same_calls = self._client.same_calls(tree, keys)
        tree.needs = needed_calls(tree, keys, probed=probed, shared_round=self._forks.shared_round)
        return tree


def _entropies(generations: Sequence[Generation]) -> Float32Array:
    return np.concatenate([each.entropies for each in generations])
