"""A tree pool without a rollout process around it, as the benchmarks use it."""

import itertools
from collections.abc import Sequence

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.rollout.context import TextCodec
from arpo_megatron.rollout.messages import LiveTree, RolloutSettings, StartTrees
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Task

GROUP = "bench"
_numbers = itertools.count()


def new_pool(engine: EngineClient, tools: ToolClient, codec: TextCodec, policy: BranchPolicy, seed: int) -> TreePool:
    """All its trees branch alike; their records are made as ever, and nobody keeps them."""
    return TreePool(engine, tools, codec, seed, lambda _settings: policy, lambda _progress: None, lambda *_entry: None)


def start(tasks: Sequence[Task], *, step: int, version: int, settings: RolloutSettings) -> StartTrees:
    """A tree for each task."""
    trees = [LiveTree(next(_numbers), GROUP, task, step, version, settings) for task in tasks]
    return StartTrees(tuple(trees), version)
