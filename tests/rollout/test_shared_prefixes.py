"""A tree that moves to another engine computes its shared prefixes there once."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import SimulatedTools
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.tasks.base import Task
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, SEED, arpo
from tests.rollout.test_pool import Accounting


@dataclass
class Mortal(Accounting):
    """Engines of which the first one to get requests from two siblings dies without answering."""

    dead: "list[Mortal]" = field(default_factory=list)
    asked_behind: Counter[str] = field(default_factory=Counter)
    most_excess: int = 0

    @property
    def down(self) -> bool:
        return any(engine is self for engine in self.dead)

    async def generate(self, request: web.Request) -> web.Response:
        behind = "".join(map(chr, (await request.json())["input_ids"])).rpartition("</result>")[0]
        self.asked_behind[behind] += 1
        if behind and self.asked_behind[behind] > 1 and not self.dead:
            self.dead.append(self)
        answering = asyncio.create_task(super().generate(request))
        while not (self.down or answering.done()):
            await asyncio.sleep(0.005)
            self.most_excess = max(self.most_excess, self.computed - self.needed)
        self.asked_behind[behind] -= 1
        return web.Response(status=503) if self.down else await answering


def script(text: str, seed: int) -> str:
    """Each path writes another text; otherwise trajectories would share tokens by chance."""
    *answered, current = text.partition("?")[2].split("</result>")
    own = "".join(chr(97 + seed // 26**place % 26) for place in range(6))
    part = own + ("<python>1+1</python>" if len(answered) < 4 else "<answer>ok and done</answer>")
    return part[len(current) :]


def test_engine_failure_recomputes_shared_prefixes_once(
    scripted_engine: Callable[[ScriptedEngine], ScriptedEngine],
) -> None:
    dead: list[Mortal] = []
    engines = [Mortal(str, seeded=script, delay_s=lambda _text: 0.05, dead=dead) for _ in range(2)]
    for engine in engines:
        scripted_engine(engine)

    async def run() -> RolloutReport:
        policy, limits = arpo(16, 2, k=4, branch_probability=1.0), RolloutLimits(3000, 900, 5, 60, 5.0)
        async with EngineClient(*(engine.url for engine in engines)) as client:
            pool = new_pool(client, SimulatedTools(0.01, lambda _r: 1.0), CODEC, policy, SEED)
            settings = RolloutSettings(policy.config, 16, Sampling(), limits)
            task = Task("t", (), "", "math", "p" * 200 + "?")
            await pool.start(start((task,), step=0, version=0, settings=settings))
            try:
                return await pool.collect(CollectTrees(PURPOSE))
            finally:
                await pool.close()

    report = asyncio.run(run())
    (other,) = (engine for engine in engines if not engine.down)
    assert report.failed == []
    assert other.answered > 8
    assert other.most_excess == 0


def prefills_of_a_step(scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], incarnation: str, fail: int) -> int:
    """Grow eight trees, of which the request with number `fail` is answered with HTTP 500; return the prefills."""
    policy, limits = arpo(16, 2, k=4, branch_probability=1.0), RolloutLimits(3000, 900, 5, 60, 5.0)
    engine = ScriptedEngine(str, seeded=script, delay_s=lambda _text: 0.02, incarnation=incarnation)
    engine.fails = lambda _body: len(engine.requests) == fail
    scripted_engine(engine)

    async def run() -> RolloutReport:
        async with EngineClient(engine.url) as client:
            pool = new_pool(client, SimulatedTools(0.01, lambda _r: 1.0), CODEC, policy, SEED)
            settings = RolloutSettings(policy.config, 16, Sampling(), limits)
            tasks = tuple(Task(f"t{n}", (), "", "math", f"{n}" * 40 + "?") for n in range(8))
            await pool.start(start(tasks, step=0, version=0, settings=settings))
            try:
                return await pool.collect(CollectTrees(PURPOSE))
            finally:
                await pool.close()

    report = asyncio.run(run())
    assert report.failed == []
    assert report.stats.counts.retries == bool(fail)
    return sum(body["sampling_params"]["max_new_tokens"] == 0 for body in engine.requests)


@pytest.mark.parametrize("incarnation", ["first", ""])
def test_failed_request_costs_only_its_own_repeat(
    scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], incarnation: str
) -> None:
    assert prefills_of_a_step(scripted_engine, incarnation, fail=60) == 8
