"""Deadlines of requests that queue in an engine: they count the time for which a request runs."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.bench.stub_engine import StubSettings, launch_stub
from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task

DEADLINE_S = 1.5
FIRST_TOKENS = 4


async def sample(client: EngineClient, firsts: list[Generation] | None = None) -> Generation:
    """Ask for 24 tokens; `firsts` receives the first ones."""
    first = None if firsts is None else (FIRST_TOKENS, firsts.append)
    return await client.generate(np.arange(9, dtype=np.int32), max_new_tokens=24, sampling=Sampling(), first=first)


@pytest.mark.parametrize("streams", [True, False])
def test_streamed_request_may_queue_beyond_its_deadline(streams: bool) -> None:
    """Ten requests take turns of 0.4 s. Without streams nothing shows that a request waits in the queue."""

    async def run(url: str) -> None:
        async with EngineClient(url, streams=streams, request_timeout_s=DEADLINE_S, retry_for_s=60.0) as client:
            began = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(sample(client, [] if streams else None) for _ in range(10)))
            assert asyncio.get_running_loop().time() - began > 2 * DEADLINE_S
            assert {len(answer.token_ids) for answer in answers} == {24}
            if streams:
                assert client.retries == {}
            else:
                assert client.retries["timeout"] >= 5, "only three fit before the deadline of the others"

    with launch_stub(StubSettings(call=1, answer_s=0.2 if streams else 0.4, requests=1)) as url:
        asyncio.run(run(url))


def test_request_that_runs_longer_than_its_deadline_fails_or_ends_after_its_first_tokens() -> None:
    """Siblings may exist that continue after the first tokens, so these stay."""

    async def run(url: str) -> None:
        async with EngineClient(url, streams=True, request_timeout_s=0.3) as client:
            firsts: list[Generation] = []
            answer = await sample(client, firsts)
            assert answer.finish is EngineFinish.CUT_SHORT
            assert answer.token_ids.tolist() == firsts[0].token_ids.tolist() == [20] * FIRST_TOKENS
            assert client.retries["timeout"] >= 1
        async with EngineClient(url, request_timeout_s=0.3, retry_for_s=0.1) as client:
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                await sample(client)
            assert client.retries == {"timeout": 2}, "the first attempt, and its repeat"

    with launch_stub(StubSettings(call=1, answer_s=1.0)) as url:
        asyncio.run(run(url))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TokenizerCodec:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder)
    return TokenizerCodec(folder)


@pytest.fixture
def slots_url(codec: TokenizerCodec) -> Iterator[str]:
    """A stub engine that runs 10 requests at a time, each for 0.3 s."""
    with launch_stub(StubSettings(call=codec.vocabulary_size - 1, answer_s=0.3, requests=10)) as url:
        yield url


@pytest.mark.parametrize("admitted", [True, False])
def test_admission_keeps_requests_within_their_deadlines(codec: TokenizerCodec, slots_url: str, admitted: bool) -> None:
    """48 trees begin with 3 paths, so without it the last request waits for 14 others in its slot, 4.2 s.

    The requests are not streamed, as behind SGLang's router: their deadlines count the wait in the engine's queue.
    """
    deadline_s = 2.0
    algorithm = AlgorithmConfig(group_size=4, initial_rollouts=3, entropy_tokens=4)
    limits = RolloutLimits(2048, 1024, max_tool_calls=1, max_tool_tokens=32, tool_timeout_s=60.0)

    async def run() -> tuple[RolloutReport, int]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                EngineClient(slots_url, request_timeout_s=deadline_s, retry_for_s=0.1)
            )
            gate = await stack.enter_async_context(AdmissionGate(client, codec)) if admitted else None
            policy = make_branch_policy(algorithm, vocabulary_size=codec.vocabulary_size, seed=1)
            pool = new_pool(client, SimulatedTools(0.02, LATENCIES["constant"]), codec, policy, 1, gate)
            settings = RolloutSettings(algorithm, algorithm.group_size, Sampling(), limits)
            tasks = tuple(Task(f"task {n}", (), "", "math", f" w{n} w2") for n in range(48))
            await pool.start(start(tasks, step=0, version=0, settings=settings))
            try:
                return await pool.collect(CollectTrees(PURPOSE)), client.retries["timeout"]
            finally:
                await pool.close()

    report, timeouts = asyncio.run(run())
    if admitted:
        assert (len(report.trees), report.failed, timeouts) == (48, [], 0)
        assert {len(tree.leaves()) for tree in report.trees} == {algorithm.group_size}
        assert report.stats.counts.longest_request_s < deadline_s
    else:
        assert timeouts > 0
        assert report.failed
