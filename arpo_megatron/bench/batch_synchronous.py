"""The loop that the benchmark compares with, in the manner of the authors' released code: everything in rounds.

All active trajectories of all tasks sample a segment; when the last one has ended, all their tools are called; when the
last one has answered, the policy is asked for forks by the entropy of the segment BEFORE the call, and the next round
begins. Prefixes are shared by the same engine's cache.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arpo_megatron.algorithms.branching import BranchPolicy, ForkPoint
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.rollout.context import RolloutLimits, TextCodec
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tree import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class _Path:
    """An active trajectory: its task, its number there, tokens so far, calls made, entropies of its first segment."""

    task: int
    number: int
    tokens: Int32Array
    calls: int = 0
    start: Float32Array | None = None


@dataclass(slots=True)
class RoundsReport:
    """Tokens sampled, segments, and trajectories of one step."""

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
    """One step: M trajectories for each task."""
    report = RoundsReport()
    prompts = [np.array(codec.encode(task.prompt_text), np.int32) for task in tasks]
    begun = [policy.initial] * len(tasks)
    active = [_Path(task, number, prompts[task]) for task in range(len(tasks)) for number in range(policy.initial)]
    while active:
        parts = await asyncio.gather(*(_segment(path, engine, limits) for path in active))
        report.tokens += sum(len(part.token_ids) for part in parts)
        report.segments += len(parts)
        called = [
            (path, part, call)
            for path, part in zip(active, parts, strict=True)
            if (call := _call(path, part, codec, limits)) is not None
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
        for (path, part, _), answer in zip(called, answers, strict=True):
            start = part.entropies if path.start is None else path.start
            tokens = _behind(path, part, answer.text, codec, limits)
            active.append(replace(path, tokens=tokens, calls=path.calls + 1, start=start))
            point = _fork_point(active[-1], part, tasks[path.task].id, step, policy.total - begun[path.task])
            for _ in range(policy.decide(point).siblings):
                active.append(replace(active[-1], number=begun[path.task]))
                begun[path.task] += 1
        if not active:  # what the forks have left becomes fresh trajectories, all at once
            active = [
                _Path(task, number, prompts[task])
                for task in range(len(tasks))
                for number in range(begun[task], policy.total)
            ]
            begun = [policy.total] * len(tasks)
    report.trajectories = sum(begun)
    return report


async def _segment(path: _Path, engine: EngineClient, limits: RolloutLimits) -> Generation:
    room = limits.max_length - len(path.tokens)
    return await engine.generate(
        path.tokens, max_new_tokens=max(1, room), sampling=Sampling(), stop=protocol.STOP_STRINGS
    )


def _fork_point(path: _Path, before: Generation, task_id: str, step: int, budget: int) -> ForkPoint:
    """Behind the answer to the call that ended the segment `before`."""
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


def _behind(path: _Path, part: Generation, answer: str, codec: TextCodec, limits: RolloutLimits) -> Int32Array:
    """A trajectory's tokens up to the end of a tool's answer."""
    longest = limits.max_tool_tokens
    result = protocol.result_tokens(answer, encode=codec.encode_plain, decode=codec.decode, max_tokens=longest)
    return np.concatenate([path.tokens, part.token_ids, np.array(result, np.int32)])


def _call(path: _Path, part: Generation, codec: TextCodec, limits: RolloutLimits) -> protocol.ToolCall | None:
    if part.finish is not EngineFinish.STOP_STRING or part.matched is None or path.calls >= limits.max_tool_calls:
        return None
    call = protocol.parse_call(codec.decode(part.token_ids.tolist()), part.matched)
    return call if isinstance(call, protocol.ToolCall) else None
