"""Tree pools without a rollout process."""

import itertools
from collections.abc import Sequence

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.messages import LiveTree, RolloutSettings, StartTrees
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.base import TextCodec

PURPOSE = "bench"
_numbers = itertools.count()


def new_pool(
    engine: EngineClient,
    tools: ToolClient,
    codec: TextCodec,
    policy: BranchPolicy,
    seed: int,
    admission: AdmissionGate | None = None,
) -> TreePool:
    """Return a pool with one branching policy for all trees. Records are made and dropped."""
    return TreePool(
        engine,
        tools,
        codec,
        seed,
        lambda _settings: policy,
        lambda _progress: None,
        lambda *_entry: None,
        admission=admission,
    )


def start(tasks: Sequence[Task], *, step: int, version: int, settings: RolloutSettings) -> StartTrees:
    """Return the request that starts one tree per task."""
    trees = [LiveTree(next(_numbers), PURPOSE, task, step, version, settings) for task in tasks]
    return StartTrees(tuple(trees), version)
