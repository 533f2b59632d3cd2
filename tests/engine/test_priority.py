"""`rollout.priority=age`: an engine takes waiting requests of older trees first, and samples the same."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.growing_trees import PRIORITIES, GrowingTrees
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.engine.options import age_options
from arpo_megatron.engine.request import Generation, Sampling
from tests.engine.fixtures import ENGINE

TREES = [f"tree {number}" for number in range(PRIORITIES + 3)]
"""In the order of their starts."""
WAITING = [TREES[number] for number in (30, 17, 29, 2, 8, 0)]


def test_fewer_older_trees_are_a_larger_priority() -> None:
    trees = GrowingTrees(by_age=True)
    for tree in TREES:
        trees.begin(tree, 0)
    priorities = [trees.fields(tree, 0)["priority"] for tree in TREES]
    assert priorities == [*range(PRIORITIES - 1, 0, -1), 0, 0, 0, 0]
    trees.end(TREES[0])
    assert [trees.priority(tree) for tree in TREES[1:]] == priorities[:-1], "each of the others has moved up"
    assert trees.fields("no tree", 0) == {}


@pytest.mark.slow_campaign
@pytest.mark.timeout(300)
def test_waiting_requests_of_older_trees_run_first_on_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    """The engine runs one request at a time. The first one is of the youngest tree, and is not preempted."""

    async def run(url: str, *, by_age: bool) -> tuple[list[str], dict[str, list[int]]]:
        ended, runs = list[str](), asyncio.Event()
        async with EngineClient(url, by_age=by_age, streams=True) as client:
            for tree in TREES:
                client.begin_tree(tree, 0)

            async def sample(tree: str, tokens: int) -> list[int]:
                def start(_first: Generation) -> None:
                    runs.set()

                prompt = [10 + (TREES.index(tree) + position) % 17 for position in range(60)]
                answer = await client.generate(
                    prompt, max_new_tokens=tokens, sampling=Sampling(0.0), key=tree, first=(2, start)
                )
                ended.append(tree)
                return answer.token_ids.tolist()

            first = asyncio.create_task(sample(TREES[-1], 1500))
            await runs.wait()
            found = dict(zip(WAITING, await asyncio.gather(*(sample(tree, 20) for tree in WAITING)), strict=True))
            await first
        return ended, found

    engine, log = replace(ENGINE, max_running_requests=1), tmp_path / "engine.log"
    with launch_engine(
        tiny_model, engine, dtype="float32", seed=1, log_path=log, options=age_options(engine.options)
    ) as handle:
        arrived, expected = asyncio.run(run(handle.url, by_age=False))
        aged, found = asyncio.run(run(handle.url, by_age=True))
    assert arrived[0] == aged[0] == TREES[-1]
    assert aged[1:] == sorted(WAITING, key=TREES.index)
    assert arrived[1:] != aged[1:]
    assert found == expected
