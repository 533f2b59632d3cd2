"""Helpers that grow a tree with a scripted engine."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arpo_megatron.algorithms.branching import ArpoPolicy, BranchPolicy
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.affinity import CacheId
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.rollout.context import RolloutContext
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.protocols.base import TextCodec
from arpo_megatron.tree import Role, RolloutTree
from tests.engine.scripted import CharacterCodec, ScriptedEngine
from tools_sandbox.client import ToolAnswer

CODEC = CharacterCodec()
LIMITS = RolloutLimits(
    max_length=1000, max_response_tokens=800, max_tool_calls=3, max_tool_tokens=200, tool_timeout_s=10.0
)
SEED = 5
PROMPT = "What is 1+1? "
PLAN = (
    "<think>ask</think><python>1+1</python>",
    "<think>and double</think><python>2*2</python>",
    "<think>sure</think><answer>\\boxed{4}</answer>",
)
Start = Callable[[ScriptedEngine], ScriptedEngine]


class LocalEngine:
    """Common part of the engine clients that answer in this process: no cache, no streams."""

    streams = False

    def cache_id(self, _key: str) -> CacheId:
        return "", None, 0

    async def prefill(self, input_ids: Any, **_options: Any) -> tuple[int, int]:
        return len(input_ids), 0


def sampled(ids: Sequence[int], finish: EngineFinish, matched: str | None, prompt: int, version: int = 0) -> Generation:
    """Return an answer whose tokens all have an entropy of 0.5 and a log-prob of -0.5 nats."""
    values = np.full(len(ids), 0.5, np.float32)
    return Generation(np.array(ids, np.int32), -values, values, finish, matched, prompt, 0, version)


def planned(*plan: str) -> Callable[[str], str]:
    """Return a script in which the n-th part of the plan follows the n-th tool result."""

    def script(text: str) -> str:
        *answered, current = text[text.index(PROMPT) + len(PROMPT) :].split("</result>")
        part = plan[min(len(answered), len(plan) - 1)]
        assert part.startswith(current)
        return part[len(current) :]

    return script


def arpo(samples: int, initial: int, *, k: int = 6, **fields: Any) -> ArpoPolicy:
    config = AlgorithmConfig(group_size=samples, initial_rollouts=initial, entropy_tokens=k, **fields)
    return ArpoPolicy(config, CODEC.vocabulary_size, seed=SEED)


class SlowTools(ToolClient):
    """The real tools, whose answers arrive up to 20 ms later."""

    def __init__(self, url: str, delays: random.Random | None, retry_for_s: float) -> None:
        super().__init__(url, retry_for_s=retry_for_s)
        self._delays = delays

    async def call(self, *arguments: Any, **options: Any) -> ToolAnswer:
        answer = await super().call(*arguments, **options)
        if self._delays is not None:
            await asyncio.sleep(self._delays.random() * 0.02)
        return answer


def grow(
    engine_url: str,
    sandbox_url: str,
    policy: BranchPolicy,
    *,
    limits: RolloutLimits = LIMITS,
    retry_for_s: float = 5.0,
    slow_tools: random.Random | None = None,
    codec: TextCodec = CODEC,
    entries: Sequence[bytes] = (),
    record: Callable[[bytes], None] = lambda _entry: None,
    streams: bool = False,
    other_tools: Any = None,
) -> tuple[RolloutTree, TreeGrower]:
    """Grow one tree for PROMPT."""

    async def run() -> tuple[RolloutTree, TreeGrower]:
        async with (
            EngineClient(engine_url, retry_for_s=retry_for_s, streams=streams) as engine,
            SlowTools(sandbox_url, slow_tools, retry_for_s) as tools,
        ):
            used = other_tools or tools
            context = RolloutContext(engine, used, codec, policy, Sampling(), limits, SEED, 3, lambda _tokens: None)
            prompt = np.array(CODEC.encode(PROMPT), np.int32)
            grower = TreeGrower("task-1", prompt, context, entries=entries, record=record)
            return await grower.grow(), grower

    return asyncio.run(run())


def texts(tree: RolloutTree, leaf: int) -> list[str]:
    return [CODEC.decode(tree.segments[index].token_ids.tolist()) for index in tree.path(leaf)]


def fork_points(tree: RolloutTree) -> list[int]:
    """Return the number of MODEL children of each TOOL segment."""
    return [
        len(below) for below, segment in zip(tree.children(), tree.segments, strict=True) if segment.role is Role.TOOL
    ]


def any_of(text: str, seed: int) -> str:
    """Return the text of a seeded engine: one to four calls, and text that depends only on the path's seed."""
    *answered, current = text.removeprefix(PROMPT).split("</result>")
    number = random.Random(seed).randrange(100)
    end = "<answer>\\boxed{4}</answer>"
    part = f"{number}{end if len(answered) > 1 + number % 3 else f'<python>{number}</python>'}"
    assert part.startswith(current)
    return part[len(current) :]
