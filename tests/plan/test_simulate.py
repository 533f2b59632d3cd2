"""The discrete-event model of rollouts: what it counts, and that it agrees with a real engine."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.bench import pressure
from arpo_megatron.bench.engine_times import measure_engine
from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.engine import launch
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.server import main as engine_main
from arpo_megatron.jobs.resolve import resolve
from arpo_megatron.plan import Hardware, plan
from arpo_megatron.plan.recommend import CHOICES, recommend
from arpo_megatron.plan.simulate import RolloutModel, SimulatedRollout, simulate
from arpo_megatron.plan.simulated_engine import EngineModel, KvBlock, Request, SimulatedEngine
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.messages import RolloutReport
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tree import Int32Array, Role, RolloutTree
from arpo_megatron.utils.service_spec import ServiceSpec
from tests.plan import traced_engine

MIX = Mix(samples=8, initial=4, calls=3, prompt=200, segment=(20, 60), result=(50, 150))
ENGINE = EngineModel(tokens=10**6, requests=64, step_s=0.01, prefill_s=1e-4, batch_s=0.01)


def rollout(count: int = 6, **fields: object) -> RolloutModel:
    grown = tuple(MIX.tree(seed, 64) for seed in range(count))
    model = RolloutModel(ENGINE, grown, count, lambda _tree, _segment: 0.5, 1000, MIX.initial, 4)
    return replace(model, **fields)  # type: ignore[arg-type]


def segments(model: RolloutModel, role: Role) -> int:
    return sum(each.role is role for tree in model.trees for each in tree.segments)


@pytest.mark.parametrize("admission", ["kv", "all"])
def test_pool_that_holds_everything_computes_each_token_once(admission: str) -> None:
    model = rollout(admission=admission)
    found = simulate(model)
    assert found.evicted == found.retracted == 0
    assert found.sampled == sum(len(s) for tree in model.trees for s in tree.segments if s.role is Role.MODEL)
    assert found.requests == segments(model, Role.MODEL) + len(model.trees), "and one for each prompt"
    assert found.computed == found.given + segments(model, Role.MODEL), "and the last token of each prefix"


def test_one_path_takes_the_sum_of_its_parts() -> None:
    tree = RolloutTree("t", np.arange(100))
    call = tree.add(0, Role.MODEL, np.arange(11))
    result = tree.add(call, Role.TOOL, np.arange(30))
    tree.add(result, Role.MODEL, np.arange(21))
    found = simulate(rollout(trees=(tree,), per_step=1, initial=1, admission="all", train_s=7.0))
    prefills = 3 * 0.01 + (100 + 1 + 31) * 1e-4  # prompt; its last token; tool result and the token before it
    assert found.seconds == pytest.approx(prefills + (10 + 20) * 0.01 + 0.5 + 7.0)
    assert found.steps == 1


def test_small_pool_evicts_and_admission_computes_less_again() -> None:
    small = replace(ENGINE, tokens=4000)
    held, free = (simulate(rollout(engine=small, admission=each)) for each in ("kv", "all"))
    assert free.evicted > 0
    assert held.reprefill < free.reprefill
    assert held.sampled == free.sampled


def test_pool_without_room_for_the_running_requests_retracts_some() -> None:
    tiny = replace(ENGINE, tokens=1500, conservativeness=0.0)
    found = simulate(rollout(engine=tiny, admission="all", limit=1))
    assert found.retracted > 0
    assert found.sampled == simulate(rollout()).sampled


def engine_after(pool: int, *batches: Sequence[KvBlock]) -> SimulatedEngine:
    """Return an engine that has sampled five tokens after each of these blocks, one batch after the other."""
    calls = list[Callable[[], None]]()
    engine = SimulatedEngine(replace(ENGINE, tokens=pool), lambda _seconds, call: calls.append(call))
    for batch in batches:
        for above in batch:
            engine.submit(Request(above, 5, 5, lambda _request: None))
        while calls:
            calls.pop(0)()
    return engine


def test_requests_of_one_batch_compute_shared_tokens_each() -> None:
    prompt = KvBlock(None, 100)
    assert engine_after(1000, [prompt, prompt]).computed == 200
    prompt = KvBlock(None, 100)
    assert engine_after(1000, [prompt], [prompt]).computed == 101, "the last token again, whose logits are needed"


def test_tokens_that_one_request_computed_are_evicted_together() -> None:
    prompt = KvBlock(None, 100)
    assert engine_after(400, [KvBlock(prompt, 100)], [KvBlock(None, 250)]).evicted == 205
    prompt = KvBlock(None, 100)
    assert engine_after(400, [prompt], [KvBlock(prompt, 100)], [KvBlock(None, 250)]).evicted == 110


def test_staleness_overlaps_rollouts_with_training() -> None:
    alone, ahead = (simulate(rollout(12, per_step=4, staleness=each, train_s=5.0)) for each in (0, 1))
    assert alone.steps == ahead.steps == 3
    assert ahead.seconds < alone.seconds - 5.0
    assert alone.given == ahead.given


def test_requests_of_older_trees_come_first_and_sample_the_same() -> None:
    """Then fewer trees are begun at the same time, so the pool keeps their prefixes."""
    few = replace(ENGINE, tokens=6000, requests=8)
    first, aged = (simulate(rollout(engine=few, admission="all", priority=each)) for each in ("none", "age"))
    assert aged.computed < first.computed
    assert (aged.sampled, aged.requests) == (first.sampled, first.requests)


def test_queue_has_larger_priorities_first_and_equal_ones_in_their_order() -> None:
    calls, ended = list[Callable[[], None]](), list[str]()
    engine = SimulatedEngine(replace(ENGINE, requests=1), lambda _seconds, call: calls.append(call))
    for name, priority in (("runs", 0), ("young", 1), ("old", 2), ("young too", 1), ("old too", 2)):

        def done(_request: Request, name: str = name) -> None:
            ended.append(name)

        engine.submit(Request(KvBlock(None, 10), 5, 5, done, priority=priority))
        if name == "runs":
            calls.pop(0)()
    while calls:
        calls.pop(0)()
    assert ended == ["runs", "old", "old too", "young", "young too"]


def test_same_model_gives_the_same_result() -> None:
    def draws(mean_s: float) -> Callable[[int, int], float]:
        return lambda tree, segment: mean_s * float(np.random.default_rng((tree, segment)).exponential())

    def run(mean_s: float) -> SimulatedRollout:
        return simulate(rollout(engine=replace(ENGINE, tokens=4000), tool_s=draws(mean_s)))

    assert run(1.0) == run(1.0)
    assert run(1.0).seconds < run(3.0).seconds


def test_plan_recommends_admission_priority_and_staleness() -> None:
    """Two trees per step instead of eight."""
    job = resolve("deepsearch_8b", overrides=["train.tasks_per_step=16", "rollout.max_tool_calls=2"])
    found = recommend(plan(job, Hardware.named("h100-80")))
    assert set(found.results) == set(CHOICES)
    sampled = {each.sampled for each in found.results.values()}
    assert len(sampled) == 1, "the same trees"
    fresh = {choice: each.step_s for choice, each in found.results.items() if not choice[2]}
    assert found.choice[2] or fresh[found.choice] == min(fresh.values())
    assert all(better != found.choice for _, better in found.changed)
    text = found.render()
    admission, priority, staleness = found.choice
    best = f"rollout.admission={admission} rollout.priority={priority} rollout.max_staleness={staleness}"
    assert f"recommended: {best}" in text
    assert json.loads(json.dumps(found.to_dict()))["recommended"] == {
        "rollout.admission": admission,
        "rollout.priority": priority,
        "rollout.max_staleness": staleness,
    }


@pytest.mark.slow_campaign
@pytest.mark.parametrize("admission", ["kv", "all"])
def test_prefill_and_evictions_agree_with_a_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admission: str
) -> None:
    """A pool of a third of a step's tokens. Each request comes before the same batch in the model and in the engine.

    The figures of the whole simulation are only printed: they follow from the speed of engine and client during the
    step, which other load on the machine changes.
    """
    pool, trace = 16_000, tmp_path / "trace"
    monkeypatch.setenv(traced_engine.TRACE_FILE, str(trace))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setattr(launch, "engine_service", partial(_traced, launch.engine_service))
    write_model(tmp_path / "model")
    codec = TokenizerCodec(tmp_path / "model")
    engine = replace(pressure.ENGINE, max_total_tokens=pool)

    async def measure(url: str) -> tuple[RolloutReport, EngineModel]:
        async with EngineClient(url, streams=True) as client:
            times = await measure_engine(client)
            async with AdmissionGate(client, codec) if admission == "kv" else nullcontext() as gate:
                return await pressure._step(client, codec, 1, 1.0, gate), times

    with launch.launch_engine(tmp_path / "model", engine, dtype="float32", seed=1, log_path=tmp_path / "log") as handle:
        report, times = asyncio.run(measure(handle.url))

    def tool_s(tree: int, segment: int) -> float:
        called = report.trees[tree].segments[segment].tool
        assert called is not None
        return called.seconds

    limit, initial = pressure.LIMITS.max_response_tokens, pressure.ALGORITHM.initial_rollouts
    model = RolloutModel(times, report.trees, len(report.trees), tool_s, limit or 0, initial or 0, 4)
    found, counts = simulate(replace(model, admission=admission)), report.stats.counts
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    events = events[max(index for index, each in enumerate(events) if each == ["flush"]) :]
    computed, evicted = (sum(each[1] for each in events if each[0] == name) for name in ("prefill", "evict"))
    replayed = _replay(report.trees, events, times)
    print(f"{admission}, computed and evicted tokens: engine {computed}, {evicted}; ", end="")
    print(f"model {replayed.computed}, {replayed.evicted}; whole simulation: {found.computed}, {found.evicted}")
    print(f"real {report.stats.seconds:.1f} s; {times}; {found}")
    assert found.requests == counts.requests
    assert computed >= counts.prefilled_tokens > 0
    assert replayed.computed == pytest.approx(computed, rel=0.05)
    assert replayed.evicted == pytest.approx(evicted, rel=0.05)


def _traced(service: Callable[..., ServiceSpec], *arguments: object, **options: object) -> ServiceSpec:
    spec = service(*arguments, **options)
    command = [traced_engine.__name__ if word == engine_main.__name__ else word for word in spec.command]
    assert command != spec.command
    return replace(spec, command=command)


def _replay(trees: Sequence[RolloutTree], events: Sequence[Any], times: EngineModel) -> SimulatedEngine:
    """Run the modeled engine for as many batches as the real one, with the same requests before each."""
    # by prompt: its last block, and the MODEL segments after it
    segments = dict[int, tuple[KvBlock, list[tuple[KvBlock, int]]]]()
    for tree in trees:
        blocks, paths = list[KvBlock](), list[Int32Array]()
        for segment in tree.segments:
            above, model = segment.parent, segment.role is Role.MODEL
            paths.append(segment.token_ids if above < 0 else np.concatenate([paths[above], segment.token_ids]))
            blocks.append(KvBlock(None if above < 0 else blocks[above], 0 if model else len(segment)))
            if model:
                after = segments.setdefault(traced_engine.fingerprint(paths[above]), (blocks[above], []))[1]
                after.append((blocks[-1], len(segment)))
    sampled = {each[1]: each[2] for each in events if each[0] == "finish"}
    calls = list[Callable[[], None]]()
    engine = SimulatedEngine(times, lambda _seconds, call: calls.append(call), quantum=1)
    matched = 0
    for name, *values in events:
        if name == "request":
            request_id, prompt, length, limit = values
            above, after = segments.get(prompt, (KvBlock(None, length), []))  # probes and health checks have no segment
            tokens = sampled[request_id] if limit > 1 else 0
            request = Request(above, tokens, limit, lambda _request: None)
            if siblings := [each for each in after if each[1] == tokens]:
                after.remove(siblings[0])
                request.output = siblings[0][0]
                matched += 1
            engine.submit(request)
        elif name in ("prefill", "decode"):
            now, calls[:] = calls[:], []
            for call in now:
                call()
    while calls:
        calls.pop(0)()
    assert matched == sum(segment.role is Role.MODEL for tree in trees for segment in tree.segments)
    return engine
