"""Trees that grow together in a pool, with a scripted engine."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from arpo_megatron.algorithms.branching import GrpoPolicy
from arpo_megatron.bench.batch_synchronous import grow_in_rounds
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.rollout import MeteredEngine
from arpo_megatron.bench.simulated_tools import SimulatedTools
from arpo_megatron.engine.affinity import FIRST_BACKOFF_S
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.lost_branches import AnsweredShares
from arpo_megatron.rollout.messages import (
    CollectTrees,
    LiveTree,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    StartTrees,
)
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.tree_client import TreeClient
from arpo_megatron.tasks.base import Task
from tests.engine.scripted import CharacterCodec, ScriptedEngine
from tests.rollout.growing import CODEC, SEED, arpo
from tests.rollout.prefix_cache import PrefixCache
from tools_sandbox.client import SandboxUnavailable, ToolAnswer

Start = Callable[[ScriptedEngine], ScriptedEngine]


@dataclass
class Refusing(ScriptedEngine):
    """Refuses the first request."""

    refused: bool = False

    async def generate(self, request: web.Request) -> web.Response:
        if not self.refused:
            self.refused = True
            return web.Response(status=404)
        return await super().generate(request)


def test_refused_common_prefill_fails_no_tree(scripted_engine: Start) -> None:
    engine = Refusing(lambda _text: "<answer>1</answer>")
    scripted_engine(engine)
    report = asyncio.run(grown(engine, tuple(Task(f"t{n}", (), "", "math", "p" * 200 + str(n)) for n in range(3))))
    assert engine.refused
    assert [tree.task_id for tree in report.trees] == ["t0", "t1", "t2"]
    assert report.failed == []


def test_retries_and_tokens_are_counted_for_their_purpose(scripted_engine: Start) -> None:
    """In either order of the two reports."""
    training = scripted_engine(ScriptedEngine(lambda _text: "<answer>1</answer>", fail_first=1))
    reported: list[RolloutProgress] = []

    async def run() -> list[RolloutReport]:
        async with EngineClient(training.url) as client:
            pool = TreePool(
                client,
                SimulatedTools(0.1, lambda _r: 1.0),
                CODEC,
                SEED,
                lambda _settings: GrpoPolicy(1),
                reported.append,
                lambda *_entry: None,
            )
            settings = RolloutSettings(None, 1, Sampling(), RolloutLimits(3000, 900, 4, 60, 5.0))
            try:
                for number, purpose in enumerate(("training", "evaluation")):
                    tree = LiveTree(number, purpose, Task(purpose, (), "", "math", "p"), 0, 0, settings)
                    await pool.start(StartTrees((tree,), 0))
                    await pool.finish(purpose)  # the first request is that of training
                reported.clear()
                return [await pool.collect(CollectTrees(purpose)) for purpose in ("evaluation", "training")]
            finally:
                await pool.close()

    reports = asyncio.run(run())
    assert [report.trees[0].task_id for report in reports] == ["evaluation", "training"]
    assert [report.stats.counts.retries for report in reports] == [0, 1]
    assert {progress.tokens_sampled for progress in reported} == {reports[0].stats.counts.tokens_sampled}


def test_retries_of_a_failed_common_prefill_are_counted(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(str, fail_first=1000))
    tasks = tuple(Task(f"t{n}", (), "", "math", "p" * 50) for n in range(2))
    report = asyncio.run(grown(engine, tasks, retry_for_s=1.0))
    assert len(report.failed) == 2
    assert report.stats.counts.retries == len(engine.requests) > 1


def test_start_of_many_trees_lets_others_grow_between_two_of_them() -> None:
    """Prompts are tokenized and records decoded one tree per turn of the event loop."""
    steps = most = 0

    def count(*_arguments: object) -> GrpoPolicy:
        nonlocal steps
        steps += 1
        return GrpoPolicy(1)

    class Counted(CharacterCodec):
        def encode(self, text: str) -> list[int]:
            count()
            return super().encode(text)

    async def run() -> None:
        nonlocal most
        async with EngineClient("http://127.0.0.1:9") as client:
            tools = SimulatedTools(0.0, lambda _r: 1.0)
            pool = TreePool(client, tools, Counted(), SEED, count, lambda _progress: None, lambda *_entry: None)
            settings = RolloutSettings(None, 1, Sampling(), RolloutLimits(3000, 900, 4, 60, 5.0))
            tasks = tuple(Task(f"t{number}", (), "", "math", "p") for number in range(50))
            starting = asyncio.create_task(pool.start(start(tasks, step=0, version=0, settings=settings)))
            while not starting.done():
                before = steps
                await asyncio.sleep(0)
                most = max(most, steps - before)
            await pool.close()

    asyncio.run(run())
    assert steps == 2 * 50
    assert most == 1


@pytest.mark.parametrize("method", ["_send_call", "_write_segment"])
def test_bug_in_one_tree_fails_that_tree_with_its_traceback(
    scripted_engine: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """`_write_segment` also fails when the tree is reported."""
    owner: Any = TreeClient if method == "_send_call" else TreeGrower
    correct = getattr(owner, method)

    def broken(self: Any, *arguments: Any) -> Any:
        if "t1" in (getattr(self, "task_id", None), getattr(self, "_task_id", None)):
            raise KeyError("a programming error")
        return correct(self, *arguments)

    monkeypatch.setattr(owner, method, broken)
    engine = scripted_engine(ScriptedEngine(lambda text: "<python>1</python>" if "result" not in text else "</answer>"))
    report = asyncio.run(grown(engine, tuple(Task(f"t{n}", (), "", "math", f"p{n}") for n in range(3))))
    assert [tree.task_id for tree in report.trees] == ["t0", "t2"]
    (failed,) = report.failed
    assert (failed.tree.task_id, report.stats.failed) == ("t1", 1)
    assert failed.reason == "KeyError: 'a programming error' (its traceback is in rollout.log)"
    assert 'raise KeyError("a programming error")' in capsys.readouterr().err


@pytest.mark.parametrize("k", [6, 38])
def test_report_predicts_tokens_that_were_sampled_alone(scripted_engine: Start, k: int) -> None:
    """After 38 tokens a tag has begun."""

    def script(text: str) -> str:
        part = "<think>and double</think><python>2*2</python>" if text.count("</result>") < 2 else "<answer>4</answer>"
        return part[len(text.rpartition("</result>")[2].rpartition("?")[2]) :]

    engine = scripted_engine(ScriptedEngine(script))
    report = asyncio.run(grown(engine, (Task("t", (), "", "math", "p?"),), k=k))
    assert report.stats.totals.predicted_prompt_tokens == report.stats.counts.prompt_tokens


@dataclass
class Accounting(ScriptedEngine):
    """Counts, between two pushes, the computed tokens and those that had to be computed."""

    asked: PrefixCache = field(default_factory=PrefixCache)
    computed: int = 0
    needed: int = 0
    excess: list[int] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.Response:
        ids = np.array((await request.json())["input_ids"], np.int32)
        self.computed += len(ids) - self._cached(ids.tolist()) - 1  # the last one is computed by every request
        self.needed += len(ids) - self.asked.insert(ids)
        return await super().generate(request)

    async def done(self, request: web.Request) -> web.Response:
        if request.path == "/flush_cache":
            self.excess.append(self.computed - self.needed)
            self.computed, self.needed, self.asked = 0, 0, PrefixCache()
            self._kept = set()
        return web.Response()


@pytest.mark.parametrize("common", [0, 100])
def test_push_recomputes_each_token_once(scripted_engine: Start, common: int) -> None:
    def script(text: str, seed: int) -> str:
        """Each path writes another text; otherwise trajectories would share tokens by chance."""
        *answered, current = text.partition("?")[2].split("</result>")
        own = "".join(chr(97 + seed // 26**place % 26) for place in range(6))
        part = own + ("<python>1+1</python>" if len(answered) < 3 else "<answer>ok and done</answer>")
        return part[len(current) :]

    engine = Accounting(str, seeded=script, delay_s=lambda _text: 0.03)
    scripted_engine(engine)
    tasks = tuple(Task(f"t{n}", (), "", "math", f"{'s' * common}{n}{'p' * 200}?") for n in range(3))
    report = asyncio.run(grown(engine, tasks, pushes=3, group_size=8, initial_rollouts=4))
    assert report.failed == []
    assert len({segment.policy_version for tree in report.trees for segment in tree.segments}) > 2
    assert len(engine.excess) >= 3
    assert max(engine.excess) <= 0


class FailsFirst(SimulatedTools):
    """Tools whose first call fails."""

    failed = False

    async def call(self, *arguments: Any, **options: Any) -> ToolAnswer:
        if not self.failed:
            self.failed = True
            raise SandboxUnavailable("HTTP 503")
        return await super().call(*arguments, **options)


def test_shares_of_answered_calls_are_those_of_several_reports_also_after_a_stop(scripted_engine: Start) -> None:
    """A stop is how a step gives up the surplus of `rollout.oversampling`."""
    engine = scripted_engine(ScriptedEngine(lambda text: "<python>1</python>" if "result" not in text else "</answer>"))

    async def run() -> list[RolloutReport]:
        async with EngineClient(engine.url) as client:
            pool = new_pool(client, FailsFirst(0.0, lambda _r: 1.0), CODEC, GrpoPolicy(1), SEED)
            settings = RolloutSettings(None, 1, Sampling(), RolloutLimits(3000, 900, 4, 60, 5.0))
            found = []
            try:
                for number, stops in enumerate((False, True, False)):
                    task = Task(f"t{number}", (), "", "math", "p")
                    await pool.start(start((task,), step=0, version=0, settings=settings))
                    await asyncio.sleep(0)
                    found.append(await (pool.stop(PURPOSE) if stops else pool.collect(CollectTrees(PURPOSE))))
            finally:
                await pool.close()
            return found

    failed, stopped, answered = asyncio.run(run())
    shares = AnsweredShares()
    assert (len(failed.failed), shares.add(failed.calls)) == (1, {"python": 0.0})
    assert [each.reason for each in stopped.failed] == ["TreeStoppedError: it was stopped"]
    assert len(answered.trees) == 1
    shares.add(stopped.calls)
    assert shares.add(answered.calls) == {"python": pytest.approx(1 / (1 + 0.9**2))}


def test_benchmark_modes_wait_for_the_same_tools(scripted_engine: Start) -> None:
    def script(text: str) -> str:
        return "<python>1+1</python>" if text.count("</result>") < 2 else "<answer>42</answer>"

    def tools(drawn: list[float]) -> SimulatedTools:
        def latency(rng: np.random.Generator) -> float:
            drawn.append(rng.random())
            return 0.0

        return SimulatedTools(1.0, latency)

    async def in_rounds(simulated: SimulatedTools) -> None:
        async with EngineClient(engine.url) as client:
            policy, limits = arpo(4, 4), RolloutLimits(3000, 900, 4, 60, 5.0)
            await grow_in_rounds(
                tasks, step=3, engine=client, tools=simulated, codec=CODEC, policy=policy, limits=limits
            )

    engine = ScriptedEngine(script, delay_s=lambda text: 0.01 * (len(text) % 3))
    scripted_engine(engine)
    tasks = tuple(Task(f"t{n}", (), "", "math", f"{n}{'p' * 20}?") for n in range(3))
    rounds: list[float] = []
    trees: list[float] = []
    asyncio.run(in_rounds(tools(rounds)))
    asyncio.run(grown(engine, tasks, initial_rollouts=4, tools=tools(trees)))
    assert len(set(rounds)) == 3 * 4 * 2
    assert sorted(rounds) == sorted(trees)


def test_engine_is_busy_only_during_requests(scripted_engine: Start) -> None:
    """Waiting for a push or for a retry does not count."""

    async def busy_s() -> float:
        async with MeteredEngine(engine.url) as client:
            client.hold()
            asked = asyncio.create_task(client.generate([1, 2], max_new_tokens=4, sampling=Sampling()))
            await asyncio.sleep(0.5)
            assert client.busy_s == client.request_s == 0.0
            client.resume(engine.version)
            await asked
            assert client.retries == {"HTTP 503": 1}
            return client.busy_s

    engine = ScriptedEngine(lambda _text: "x", fail_first=1)
    scripted_engine(engine)
    began = time.monotonic()
    busy = asyncio.run(busy_s())
    assert 0 < busy < time.monotonic() - began - 0.5 - FIRST_BACKOFF_S


async def grown(
    engine: ScriptedEngine,
    tasks: tuple[Task, ...],
    *,
    pushes: int = 0,
    group_size: int = 4,
    initial_rollouts: int = 2,
    tools: SimulatedTools | None = None,
    k: int = 4,
    retry_for_s: float = 60.0,
) -> RolloutReport:
    policy = arpo(group_size, initial_rollouts, k=k, branch_probability=1.0)
    limits = RolloutLimits(3000, 900, 4, 60, 5.0)
    async with EngineClient(engine.url, retry_for_s=retry_for_s) as client:
        pool = new_pool(client, tools or SimulatedTools(0.1, lambda _r: 1.0), CODEC, policy, SEED)
        settings = RolloutSettings(policy.config, group_size, Sampling(), limits)
        await pool.start(start(tasks, step=0, version=0, settings=settings))
        try:
            for _ in range(pushes):
                enough = engine.answered + 8
                while engine.answered < enough:
                    await asyncio.sleep(0.01)
                await pool.pause()
                engine.version += 1
                pool.resume(engine.version)
            return await pool.collect(CollectTrees(PURPOSE))
        finally:
            await pool.close()
