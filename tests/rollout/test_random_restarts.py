"""Random restarts, pushes and failed requests: the trees are those that grow without any of them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from arpo_megatron.bench.simulated_tools import SimulatedTools
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.messages import CollectTrees, LiveTree, RolloutSettings, StartTrees
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.record import TreeRecord
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, SEED, arpo
from tools_sandbox.client import SandboxUnavailable, ToolAnswer

Log = list[tuple[int, bytes | RolloutTree]]
"""Messages that the trainer has received: entries of records, and finished trees, with the number of the tree."""
TREES = 4
POLICY = arpo(10, 4, k=6, branch_probability=0.8)
SHARED = RolloutSettings(POLICY.config, 10, Sampling(), replace(LIMITS, deterministic_tools=("python",)))


def script(text: str, seed: int) -> str:
    """Write one to three calls, of which many are equal, and text that only this path has."""
    *answered, current = text.partition("?")[2].split("</result>")
    call = f"<python>{seed % 2}</python>" if len(answered) < 1 + seed % 3 else "<answer>4</answer>"
    return f"{seed % 9973}{call}"[len(current) :]


class Tools(SimulatedTools):
    """Answers after up to 20 ms; a tenth of the different calls fail, and fail again when they are repeated."""

    async def call(self, tool: str, arguments: dict[str, object], *, trajectory_id: str, **options: Any) -> ToolAnswer:
        answer = await super().call(tool, arguments, trajectory_id=trajectory_id, **options)
        if random.Random(f"{trajectory_id.partition('/')[0]} {arguments['code']}").random() < 0.1:
            raise SandboxUnavailable("HTTP 503")
        return answer


async def grow(engine: ScriptedEngine, draw: random.Random, restarts: int, pushes: int) -> Log:
    """Grow the trees, with admission if the engine reports a capacity.

    The process dies `restarts` times, each time with the last messages on their way.
    """
    log: Log = []
    for left in reversed(range(restarts + 1)):
        trees = tuple(
            LiveTree(n, "fuzz", Task(f"t{n}", (), "", "math", f"{n}?"), 3, 0, SHARED, entries_of(log, n))
            for n in range(TREES)
        )
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(EngineClient(engine.url, streams=draw.random() < 0.5))
            gate = None if engine.capacity is None else await stack.enter_async_context(AdmissionGate(client))
            pool = TreePool(
                client,
                Tools(0.02, lambda rng: rng.random()),
                CODEC,
                SEED,
                policy=lambda _settings: POLICY,
                send=lambda _progress: None,
                record=lambda number, entry: log.append((number, entry)),
                finished=lambda number, tree: log.append((number, tree)),
                admission=gate,
            )
            await pool.start(StartTrees(trees, engine.version))
            collected = asyncio.create_task(pool.collect(CollectTrees("fuzz")))
            for _ in range(draw.randint(0, pushes)):
                await asyncio.sleep(0.2 * draw.random())
                await pool.pause()
                engine.version += 1
                pool.resume(engine.version)
            await asyncio.wait([collected], timeout=0.4 * draw.random() if left else None)
            received = len(log) - (draw.randrange(4) if left else 0)
            collected.cancel()
            await pool.close()
            del log[max(0, received) :]
    return log


def entries_of(log: Log, number: int) -> list[bytes]:
    return [entry for tree, entry in log if tree == number and isinstance(entry, bytes)]


def content(tree: RolloutTree) -> list[Any]:
    """Return all trajectories, without times and policy versions: a push may cut any segment in two."""
    found = []
    for leaf in tree.grown.leaves():
        path = (tree.grown.segments[index] for index in tree.grown.path(leaf))
        for role, group in groupby(path, key=lambda segment: segment.role):
            parts = list(group)
            text = CODEC.decode(np.concatenate([part.token_ids for part in parts]).tolist())
            branch, tool = parts[0].branch, parts[0].tool
            found.append((role, text, parts[-1].finish, branch and (branch.draw, branch.why), tool and tool.status))
    return found


@pytest.mark.slow_campaign
@pytest.mark.timeout(180)
def test_trees_do_not_depend_on_restarts_pushes_and_failed_requests(
    scripted_engine: Callable[[ScriptedEngine], ScriptedEngine],
) -> None:
    """Also, no tree has two results of one call, and a finished tree is the same after a restart."""
    quiet = scripted_engine(ScriptedEngine(str, seeded=script))
    log = asyncio.run(grow(quiet, random.Random(0), restarts=0, pushes=0))
    expected = {number: content(tree) for number, tree in log if isinstance(tree, RolloutTree)}
    assert len(expected) == TREES
    tokens = sum(
        len(each.token_ids) for _, tree in log if isinstance(tree, RolloutTree) for each in tree.grown.segments
    )
    shared = 0
    for seed in range(30):
        draw = random.Random(seed)
        engine = scripted_engine(
            ScriptedEngine(
                str,
                seeded=script,
                delay_s=lambda _text, draw=draw: 0.03 * draw.random(),
                cuts=draw.randrange(4),
                fails=lambda _body, draw=draw: draw.random() < 0.01,
                capacity=EngineCapacity(tokens // 3, 16) if seed % 2 else None,
            )
        )
        log = asyncio.run(grow(engine, draw, restarts=4, pushes=2))
        found = [(number, tree) for number, tree in log if isinstance(tree, RolloutTree)]
        assert {number for number, _ in found} == set(expected), seed
        assert all(content(tree) == expected[number] for number, tree in found), seed
        for number in range(TREES):
            results = TreeRecord.from_entries(entries_of(log, number)).tool_results.values()
            executed = Counter(each.shared_as for each in results if not each.tool.cached)
            assert set(executed.values()) == {1}, seed
            shared += len(results) - len(executed)
    assert shared > 0
