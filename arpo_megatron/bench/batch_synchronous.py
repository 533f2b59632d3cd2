"""A batch-synchronous rollout loop like that of the authors' released code, as the baseline of `arpo bench rollout`.

In each round all active trajectories sample a segment. After the last one ends, all tools are called. After the last
tool answers, the policy decides about forks by the entropy of the segment BEFORE the call. The engine's cache serves
shared prefixes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arpo_megatron.algorithms.branching import BranchPolicy, ForkPoint
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.base import TextCodec, ToolCall
from arpo_megatron.tasks.tags.calls import RESULT_FRAME, STOP_STRINGS, parse_call
from arpo_megatron.tree import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class _Path:
    """An active trajectory: task, number within the task, tokens, calls made, and entropies of its first segment."""

    task: int
    number: int
    tokens: Int32Array
    calls: int = 0
    start: Float32Array | None = None


@dataclass(slots=True)
class RoundsReport:
    """Counts of one step: sampled tokens, segments and trajectories."""

    tokens: int = 0
    segments: int = 0
    trajectories: int = 0


async def grow_in_rounds(
    tasks: Sequence[Task],
    *,
    step: int,
    engine: EngineClient,
    tools: ToolClient,
    codec: TextCodec,
    policy: BranchPolicy,
    limits: RolloutLimits,
) -> RoundsReport:
    """Grow M trajectories for each task."""
    report = RoundsReport()
    prompts = [np.array(codec.encode(task.prompt_text), np.int32) for task in tasks]
    started = [policy.initial] * len(tasks)
    active = [_Path(task, number, prompts[task]) for task in range(len(tasks)) for number in range(policy.initial)]
    while active:
        segments = await asyncio.gather(*(_sample_segment(path, engine, limits) for path in active))
        report.tokens += sum(len(segment.token_ids) for segment in segments)
        report.segments += len(segments)
        called = [
            (path, segment, call)
            for path, segment in zip(active, segments, strict=True)
            if (call := _call(path, segment, codec, limits)) is not None
        ]
        answers = await asyncio.gather(
            *(
                tools.call(
                    call.tool,
                    dict(call.arguments),
                    trajectory_id=f"{tasks[path.task].id}/{path.number}/{path.calls}",
                    timeout_s=limits.tool_timeout_s,
                )
                for path, _, call in called
            )
        )
        active = []
        for (path, segment, _), answer in zip(called, answers, strict=True):
            start = segment.entropies if path.start is None else path.start
            tokens = _with_result(path, segment, answer.text, codec, limits)
            active.append(replace(path, tokens=tokens, calls=path.calls + 1, start=start))
            point = _fork_point(active[-1], segment, tasks[path.task].id, step, policy.total - started[path.task])
            for _ in range(policy.decide(point).siblings):
                active.append(replace(active[-1], number=started[path.task]))
                started[path.task] += 1
        if not active:  # the rest of the budget becomes fresh trajectories
            active = [
                _Path(task, number, prompts[task])
                for task in range(len(tasks))
                for number in range(started[task], policy.total)
            ]
            started = [policy.total] * len(tasks)
    report.trajectories = sum(started)
    return report


async def _sample_segment(path: _Path, engine: EngineClient, limits: RolloutLimits) -> Generation:
    room = limits.max_length - len(path.tokens)
    return await engine.generate(path.tokens, max_new_tokens=max(1, room), sampling=Sampling(), stop=STOP_STRINGS)


def _fork_point(path: _Path, before: Generation, task_id: str, step: int, budget: int) -> ForkPoint:
    """Return the fork point after the answer to the call that ended the segment `before`."""
    assert path.start is not None
    return ForkPoint(
        task_id=task_id,
        step=step,
        path=(path.number, path.calls - 1),
        start_entropies=path.start,
        before_entropies=before.entropies,
        entropies=before.entropies,
        budget=budget,
    )


def _with_result(path: _Path, segment: Generation, answer: str, codec: TextCodec, limits: RolloutLimits) -> Int32Array:
    """Return a trajectory's tokens with the segment and the tool's answer."""
    longest = limits.max_tool_tokens
    result = RESULT_FRAME.tokens(answer, codec, longest)
    return np.concatenate([path.tokens, segment.token_ids, np.array(result, np.int32)])


def _call(path: _Path, segment: Generation, codec: TextCodec, limits: RolloutLimits) -> ToolCall | None:
    if segment.finish is not EngineFinish.STOP_STRING or segment.matched is None or path.calls >= limits.max_tool_calls:
        return None
    call = parse_call(codec.decode(segment.token_ids.tolist()), segment.matched)
    return call if isinstance(call, ToolCall) else None
