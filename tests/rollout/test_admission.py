"""Admission by KV use: who may run, in which order, and how the margin follows what the engines evict."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.branching import GrpoPolicy
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import SimulatedTools
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.admission import MAX_MARGIN, MIN_MARGIN, KvAdmission
from arpo_megatron.rollout.admission_gate import AdmissionGate, path_of
from arpo_megatron.rollout.admission_state import FIRST_MARGIN, PathId
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, RolloutSettings
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, SEED, Start, arpo
from tests.rollout.test_shared_prefixes import script

LIMITS = RolloutLimits(3000, 900, 5, 60, 5.0)


def admission(*capacities: EngineCapacity, trees: int = 4, paths: int = 4, prompt: int = 100) -> KvAdmission:
    """Return an admission with trees whose paths all ask; each counts for 310 tokens after the prompt."""
    found = KvAdmission(capacities)
    for tree in range(trees):
        found.add_tree(tree, prompt, 800)
        for path in range(paths):
            found.add_path(tree, (path,), None, prompt)
            found.ask(tree, (path,), prompt)
    return found


def granted(found: KvAdmission) -> list[PathId]:
    return [path for path, _ in found.grant()]


def test_as_many_paths_run_as_the_pool_is_expected_to_hold() -> None:
    found = admission(EngineCapacity(1700, 64))  # a prompt and four paths of 310 tokens need 1340
    assert granted(found) == [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3,))]
    assert found.figures().waiting == 12
    assert granted(found) == []


def test_request_limit_of_the_engine_holds_for_resident_paths_too() -> None:
    found = admission(EngineCapacity(10**6, 3))
    assert granted(found) == [(0, (0,)), (0, (1,)), (0, (2,))]
    found.answered(0, 0, (1,), 150, 0)
    found.ask(0, (1,), 180)
    assert granted(found) == [(0, (1,))], "it was there before path 3"


def test_path_larger_than_the_pool_runs_alone() -> None:
    found = admission(EngineCapacity(50, 8), trees=2, paths=1)
    assert granted(found) == [(0, (0,))]
    found.answered(0, 0, (0,), 120, 0)
    assert granted(found) == []
    found.end(0, (0,))
    assert granted(found) == [(1, (0,))]


def test_path_that_was_refused_runs_once_nothing_else_does() -> None:
    """Also if the margin has shrunk meanwhile, so that there is less room than when it was refused."""
    found = KvAdmission([EngineCapacity(1000, 8)])
    for tree, prompt in enumerate((20, 1500)):
        found.add_tree(tree, prompt, 80)
        found.add_path(tree, (0,), None, prompt)
        found.ask(tree, (0,), prompt)
    assert granted(found) == [(0, (0,))]
    for _ in range(9):
        found.answered(0, 0, (0,), 60, 0)
        found.ask(0, (0,), 60)
        assert granted(found) == [(0, (0,))]
    assert found.figures().margin < 0.9
    found.answered(0, 0, (0,), 60, 59)
    found.end(0, (0,))
    assert granted(found) == [(1, (0,))]


def test_sibling_with_cached_ancestors_comes_before_a_younger_tree() -> None:
    found = admission(EngineCapacity(900, 8), trees=2, paths=2)
    assert granted(found) == [(0, (0,)), (0, (1,))]
    found.answered(0, 0, (0,), 300, 0)
    found.add_path(0, (0, 0, 1), (0,), 300)
    found.ask(0, (0, 0, 1), 300)
    assert granted(found) == [], "there is no room for it, and the younger tree does not pass it"
    found.answered(0, 0, (1,), 300, 0)
    found.end(0, (1,))
    assert granted(found) == [(0, (0, 0, 1))]
    found.answered(0, 0, (0, 0, 1), 320, 299)
    assert found.figures().recomputed == 0


def test_trees_go_to_the_engine_with_the_most_room() -> None:
    found = admission(EngineCapacity(4000, 64), EngineCapacity(2000, 64), trees=3)
    where = dict(found.grant())
    assert Counter(engine for engine in where.values()) == {0: 8, 1: 4}
    assert len({engine for path, engine in where.items() if path[0] == 1}) == 1, "a tree stays on one engine"


def test_margin_shrinks_with_recomputed_tokens_and_grows_without() -> None:
    found = admission(EngineCapacity(2000, 64))
    granted(found)
    found.answered(0, 0, (0,), 200, 0)
    found.ask(0, (0,), 230)
    assert granted(found) == [(0, (0,))]
    assert found.answered(0, 0, (0,), 260, 150) == 49
    figures = found.figures()
    assert figures.recomputed == 49, "199 tokens were in the cache"
    assert (figures.trees_running, figures.trees_waiting) == (2, 2)
    assert figures.margin < FIRST_MARGIN
    for _ in range(30):
        found.ask(0, (0,), 260)
        granted(found)
        found.answered(0, 0, (0,), 260, 0)
    assert found.figures().margin >= MIN_MARGIN
    low = found.figures().margin
    for path in range(4):
        found.end(0, (path,))
    assert low < found.figures().margin <= MAX_MARGIN


def test_push_is_no_sign_of_a_full_pool() -> None:
    found = admission(EngineCapacity(2000, 64))
    granted(found)
    found.answered(0, 0, (0,), 200, 0)
    found.flushed()
    found.ask(0, (0,), 230)
    granted(found)
    found.answered(0, 0, (0,), 260, 0)
    assert (found.figures().recomputed, found.figures().margin) == (0, FIRST_MARGIN)


def test_youngest_paths_wait_again_if_the_pool_overflows() -> None:
    found = admission(EngineCapacity(1300, 64), trees=2, paths=1)
    assert granted(found) == [(0, (0,)), (1, (0,))]
    for tree in range(2):
        found.answered(0, tree, (0,), 700, 0)
    assert [found.ask(tree, (0,), 750) for tree in range(2)] == [False, True]
    fork = (0, 0, 1)
    found.add_path(1, fork, (0,), 750)
    found.ask(1, fork, 750)
    assert granted(found) == [(0, (0,))]
    assert (found.figures().suspended, found.figures().resident) == (1, 1)
    found.answered(0, 0, (0,), 800, 699)
    found.end(0, (0,))
    assert granted(found) == [(1, (0,)), (1, fork)]
    before = found.figures().margin
    assert found.answered(0, 1, (0,), 760, 0) == 699, "others took its room, and it was computed again"
    assert found.answered(0, 1, fork, 760, 0) == 699, "sent at the same time, so it found nothing either"
    assert (found.figures().recomputed, found.figures().margin) == (2 * 699, before), "the margin was not too large"
    found.ask(1, fork, 780)
    assert granted(found) == [(1, fork)]
    found.answered(0, 1, fork, 790, 0)
    assert found.figures().margin < before, "nothing took its room since"


def test_path_that_waits_longer_than_a_rebuild_of_the_pool_gives_its_room_away() -> None:
    found = admission(EngineCapacity(900, 64), trees=2, paths=1)
    found.set_capacities([EngineCapacity(500, 64)], rebuild_s=2.0)
    assert granted(found) == [(0, (0,))]
    found.answered(0, 0, (0,), 200, 0)
    assert granted(found) == []
    assert found.patience_s == 2.0
    found.release(0, (0,))
    assert granted(found) == [(1, (0,))]
    assert (found.figures().released, found.figures().resident) == (1, 1)
    found.ask(0, (0,), 230)
    assert granted(found) == [], "it waits for room, like every path that is not resident"
    found.answered(0, 1, (0,), 200, 0)
    found.end(1, (0,))
    assert granted(found) == [(0, (0,))]
    before = found.figures().margin
    assert found.answered(0, 0, (0,), 260, 0) == 199, "it lost its KV"
    assert found.figures().margin == before, "which is what the release was for, and no sign of a full pool"


def test_started_tree_moves_to_an_idle_engine_if_it_keeps_nothing() -> None:
    found = admission(EngineCapacity(500, 64), EngineCapacity(500, 64), trees=3, paths=1)
    assert found.grant() == [((0, (0,)), 0), ((1, (0,)), 1)]
    for tree in range(2):
        found.answered(tree, tree, (0,), 200, 0)
    found.ask(1, (0,), 220)
    assert found.grant() == [((1, (0,)), 1)]
    found.release(0, (0,))
    assert found.grant() == [((2, (0,)), 0)], "a younger tree has taken its room"
    found.ask(0, (0,), 230)
    assert found.grant() == [], "both engines are full"
    found.answered(1, 1, (0,), 300, 199)
    found.end(1, (0,))
    assert found.grant() == [((0, (0,)), 1)]
    before = found.figures().margin
    assert found.answered(1, 0, (0,), 260, 0) == 199, "they were in the other engine's cache"
    assert found.figures().margin == before, "the margin was not too large"
    found.ask(0, (0,), 270)
    assert found.grant() == [((0, (0,)), 1)], "and it stays there"
    assert found.figures().moved == 1


@pytest.mark.parametrize(("seconds", "paths"), [((0.5,), 1), ((9.0,), 4), ((0.1, 9.0, 0.1), 1)])
def test_paths_that_are_not_kept_through_their_calls_count_for_one_segment(
    seconds: tuple[float, ...], paths: int
) -> None:
    """The average decides: 1.9 s, -2 s, 1.9 s of a prefill of 2 s in the last case."""
    found = admission(EngineCapacity(500, 64), trees=1)
    found.set_capacities([EngineCapacity(500, 64)], rebuild_s=2.0)
    for each in seconds:
        found.tool_answered(each)
    assert len(granted(found)) == paths
    assert found.patience_s == 2.0, "a call that is shorter than a rebuild keeps its path in any case"


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(200, 5000), st.integers(1, 9))
def test_every_request_is_granted_in_the_end(seed: int, engines: int, tokens: int, requests: int) -> None:
    """No deadlock, no more requests than an engine takes, no tokens counted at the end; some trees exceed the pool."""
    draw = random.Random(seed)
    found = KvAdmission([EngineCapacity(tokens, requests)] * engines, rebuild_s=1.0)
    running: list[tuple[PathId, int]] = []
    lengths: dict[PathId, int] = {}
    segments: Counter[PathId] = Counter()

    def add(path: PathId, parent: tuple[int, ...] | None, start: int) -> None:
        found.add_path(*path, parent, start)
        lengths[path] = start
        found.ask(*path, start)

    for tree in range(6):
        prompt = draw.choice([20, 50, 300, tokens, 2 * tokens])
        found.add_tree(tree, prompt, draw.choice([80, 1000]))
        for number in range(3):
            add((tree, (number,)), None, prompt)
    paths_of_removed = draw.randrange(6)
    while lengths:
        running += found.grant()
        assert max(Counter(engine for _, engine in running).values(), default=0) <= requests
        assert running, "nothing runs although paths ask"
        path, engine = running.pop(draw.randrange(len(running)))
        lengths[path] += draw.randrange(1, 200)
        found.answered(engine, *path, lengths[path], draw.choice([0, lengths[path] // 2, None]))
        segments[path] += 1
        if draw.random() < 0.3:
            found.end(*path)
            length = lengths.pop(path)
            if draw.random() < 0.3:
                add((path[0], (*path[1], 0, 1 + len(segments))), path[1], length)
        else:
            if draw.random() < 0.5:
                found.release(*path)
            found.tool_answered(draw.choice([0.1, 0.9, 5.0]))
            found.ask(*path, lengths[path])
    found.remove_tree(paths_of_removed)
    assert found.grant() == []
    assert found.figures().resident == 0
    assert all(engine.reserved == engine.used == engine.running == 0 for engine in found._engines)


def test_path_continues_at_its_first_child() -> None:
    assert path_of((0,)) == path_of((0, 0, 0)) == (0,)
    assert path_of((2, 0, 1)) == path_of((2, 0, 1, 0, 0)) == (2, 0, 1)


@pytest.mark.parametrize("capacity", [EngineCapacity(700, 2), EngineCapacity(4000, 6)])
def test_trees_grow_as_without_admission(scripted_engine: Start, capacity: EngineCapacity) -> None:
    """Same trees, and never more requests than the engine runs and the few that it has in reserve."""
    engine = scripted_engine(ScriptedEngine(str, seeded=script, delay_s=lambda _text: 0.01, capacity=capacity))
    policy = arpo(8, 2, k=4, branch_probability=1.0)

    async def run(admitted: bool) -> RolloutReport:
        async with EngineClient(engine.url) as client, AsyncExitStack() as stack:
            gate = AdmissionGate(client) if admitted else None
            pool = new_pool(client, SimulatedTools(0.01, lambda _r: 1.0), CODEC, policy, SEED, gate)
            await stack.enter_async_context(gate or nullcontext())
            settings = RolloutSettings(policy.config, 8, Sampling(), LIMITS)
            tasks = tuple(Task(f"t{n}", (), "", "math", f"{n}" * 40 + "?") for n in range(6))
            await pool.start(start(tasks, step=0, version=0, settings=settings))
            try:
                report = await pool.collect(CollectTrees(PURPOSE))
            finally:
                await pool.close()
            assert gate is None or gate.figures().resident == gate.figures().waiting == 0
            return report

    free = asyncio.run(run(False))
    engine.most_running = 0
    held = asyncio.run(run(True))
    assert held.failed == free.failed == []
    assert held.stats.counts.admission_s > free.stats.counts.admission_s == 0.0
    for report in (held, free):
        assert 0.0 < report.stats.counts.longest_request_s < report.stats.seconds
    assert free.stats.trees_running == free.stats.trees_waiting == 0
    assert 1 <= held.stats.trees_running <= 6 - (capacity.tokens < 1000)
    assert held.stats.trees_waiting >= (capacity.tokens < 1000)
    assert held.stats.counts.evicted == held.stats.counts.tokens_recomputed == 0
    assert engine.most_running <= capacity.requests * 1.125 + 1
    for one, other in zip(held.trees, free.trees, strict=True):
        assert [segment.token_ids.tolist() for segment in one.segments] == [
            segment.token_ids.tolist() for segment in other.segments
        ]


class Forgetful(ScriptedEngine):
    """Evicts everything between two requests."""

    def _cached(self, ids: Sequence[int]) -> int:
        return 0


async def one_tree(client: EngineClient, gate: AdmissionGate, limits: RolloutLimits) -> RolloutReport:
    """Grow one tree with three paths."""
    pool = new_pool(client, SimulatedTools(0.01, lambda _r: 1.0), CODEC, GrpoPolicy(3), SEED, gate)
    growing = RolloutSettings(None, 3, Sampling(), limits)
    await pool.start(start((Task("t", (), "", "math", "1" * 40),), step=0, version=0, settings=growing))
    try:
        return await pool.collect(CollectTrees(PURPOSE))
    finally:
        await pool.close()


def test_each_request_that_finds_less_in_the_cache_counts_as_evicted(scripted_engine: Start) -> None:
    engine = scripted_engine(Forgetful(str, seeded=script, capacity=EngineCapacity(10**5, 64)))

    async def run() -> RolloutReport:
        async with EngineClient(engine.url) as client, AdmissionGate(client) as gate:
            return await one_tree(client, gate, LIMITS)

    report = asyncio.run(run())
    (tree,) = report.trees
    later = sum(segment.role is Role.MODEL and segment.parent > 0 for segment in tree.segments)
    assert report.stats.counts.evicted == later > 0
    assert report.stats.counts.tokens_recomputed > 40 * later, "the prompt at least"


def test_admission_without_a_limit_is_logged(scripted_engine: Start, capsys: pytest.CaptureFixture[str]) -> None:
    async def run(capacity: EngineCapacity | None) -> None:
        engine = scripted_engine(ScriptedEngine(lambda _text: "", capacity=capacity))
        async with EngineClient(engine.url) as client, AdmissionGate(client) as gate:
            await gate.opened()

    asyncio.run(run(EngineCapacity(8000, 4)))
    assert not capsys.readouterr().err
    asyncio.run(run(None))
    assert "all paths are admitted at once" in capsys.readouterr().err


@pytest.mark.parametrize(("small_s", "large_s"), [(0.3, 0.0), (0.0, 0.3)])
def test_paths_are_kept_if_the_time_of_a_prefill_is_unknown(
    scripted_engine: Start, capsys: pytest.CaptureFixture[str], small_s: float, large_s: float
) -> None:
    """Other load can make the shorter probe the slower one. One line reports it."""
    engine = scripted_engine(
        ScriptedEngine(
            str, delay_s=lambda text: small_s if len(text) == 16 else large_s, capacity=EngineCapacity(8000, 4)
        )
    )

    async def run() -> float:
        async with EngineClient(engine.url) as client, AdmissionGate(client, CODEC) as gate:
            await gate.opened()
            return gate.admission.patience_s

    assert math.isfinite(asyncio.run(run())) == (large_s > small_s)
    assert capsys.readouterr().err.count("paths that wait for a tool keep their room\n") == (large_s < small_s)


def test_only_calls_that_a_tool_executes_count_for_the_time_of_calls(
    scripted_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted_engine(ScriptedEngine(str, seeded=script, capacity=EngineCapacity(10**5, 64)))
    seconds: list[float] = []
    monkeypatch.setattr(KvAdmission, "tool_answered", lambda _admission, each: seconds.append(each))

    async def run() -> RolloutReport:
        async with EngineClient(engine.url) as client, AdmissionGate(client) as gate:
            return await one_tree(client, gate, replace(LIMITS, max_tool_calls=1, at_limit="answer_now"))

    counts = asyncio.run(run()).stats.counts
    assert counts.calls_at_limit > 0
    assert len(seconds) == counts.calls_executed > 0


def test_wait_for_a_push_is_no_part_of_a_request(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(str, seeded=script, capacity=EngineCapacity(10**5, 64)))

    async def run() -> RolloutReport:
        async with EngineClient(engine.url) as client, AdmissionGate(client) as gate:
            await gate.opened()
            client.hold()
            asyncio.get_running_loop().call_later(3.0, client.resume, 0)
            return await one_tree(client, gate, LIMITS)

    assert 0.0 < asyncio.run(run()).stats.counts.longest_request_s < 3.0


def test_timed_prefixes_are_tokens_of_the_vocabulary(scripted_engine: Start) -> None:
    """An engine that gets an id beyond its embedding dies."""

    class FiveTokens:
        """Knows five letters; any other character is token 4."""

        def encode(self, text: str) -> list[int]:
            return ["aeio".find(character) % 5 for character in text]

        encode_plain = encode

        def decode(self, token_ids: Sequence[int]) -> str:
            raise AssertionError("nothing is decoded")

    engine = scripted_engine(ScriptedEngine(lambda _text: "", capacity=EngineCapacity(8000, 4)))

    async def run() -> None:
        async with EngineClient(engine.url) as client, AdmissionGate(client, FiveTokens()) as gate:
            while not gate.urls:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    prefixes = [request["input_ids"] for request in engine.requests]
    assert {len(prefix) for prefix in prefixes} == {16, 1024}
    assert {token for prefix in prefixes for token in prefix} == set(range(5))
