"""Expert routes of a real engine: stored in the trees and replayed by the trainer."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import AlgorithmConfig, EngineConfig, JobConfig, ModelConfig, OptimizerConfig, RolloutConfig
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.expert_routes import ExpertRouteRequest, ExpertRouteSpec
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.tree_store import read_trees
from arpo_megatron.packing.layout import drop_routes
from arpo_megatron.packing.packs import pack_trees, split_by_tree
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings, ServiceSettings
from arpo_megatron.rollout.record import TreeRecord
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree
from tests.engine.mixtures import SHAPE, write_mixture
from tests.rollout.launched import launched_rollouts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the expectations are those of float32 on a CPU")

ENGINE = EngineConfig(max_total_tokens=32768, memory_fraction=0.1, max_running_requests=32, startup_timeout_s=400)


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("moe") / "model", tiny_model)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with launch_engine(model, ENGINE, dtype="float32", seed=1, log_path=log, expert_routes=True) as handle:
        yield handle


@pytest.fixture(scope="module")
def job() -> JobConfig:
    return JobConfig(
        name="test",
        model=ModelConfig(path=Path("not read here"), dtype="float32", max_length=300),
        algorithm=AlgorithmConfig(
            group_size=8,
            initial_rollouts=3,
            entropy_tokens=3,
            branch_probability=1.0,
            entropy_weight=0.0,
            router_replay="rollout",
        ),
        rollout=RolloutConfig(max_response_tokens=120, max_tool_tokens=40),
    )


@pytest.fixture(scope="module")
def trees(engine: EngineHandle, model: Path, sandbox_url: str, job: JobConfig) -> list[RolloutTree]:
    tasks = [Task(f"task-{n}", (), "1", "math", f"{'1 2 3 + 4 * 5 ' * 3}{n} + {7 * n}\n") for n in range(6)]
    with launched_rollouts(ServiceSettings((engine.url,), sandbox_url, model, seed=4, expert_routes=SHAPE)) as handle:
        report = handle.grow_trees(tasks, step=1, version=0, settings=RolloutSettings.training(job))
    assert report.failed == []
    assert report.stats.totals.forks > 0
    return report.trees


def test_segments_have_routes_of_all_tokens_but_the_last_of_a_leaf(trees: list[RolloutTree]) -> None:
    for tree in trees:
        leaves = set(tree.leaves())
        for index, segment in enumerate(tree.segments):
            assert segment.routes is not None
            unknown = np.flatnonzero((segment.routes == -1).all(axis=(1, 2))).tolist()
            assert unknown == ([len(segment) - 1] if index in leaves else []), (index, segment.role)


def test_routes_survive_pushes(engine: EngineHandle, model: Path, sandbox_url: str, job: JobConfig) -> None:
    """Each token keeps the routes of its first request, even if newer weights continue after it."""
    asked = [Task(f"task-{n}", (), "1", "math", f"{'4 * 5 - 1 ' * 3}{n} + {7 * n}\n") for n in range(8)]
    with launched_rollouts(ServiceSettings((engine.url,), sandbox_url, model, seed=4, expert_routes=SHAPE)) as handle:
        cut: list[Generation] = []
        records: list[TreeRecord] = []
        for attempt in range(100):
            if len(cut) >= 5:  # pauses met these with tokens sampled already
                break
            if not records:  # at first, and if all trees have ended meanwhile
                settings = RolloutSettings.training(job)
                handle.start_trees("training", asked, step=attempt, version=0, settings=settings)
            time.sleep(min(0.05 * 1.1**attempt, 1.0))  # a busy machine samples nothing within the shortest
            handle.pause()
            handle.resume(0)
            records = [TreeRecord.from_entries(tree.entries) for tree in handle.unfinished_trees("training")]
            parts = [part for record in records for answers in record.generations.values() for part in answers]
            cut = [part for part in parts if part.finish == "cut_short" and len(part.token_ids)] or cut
        assert cut, "no pause met a generation"
        report = handle.collect(CollectTrees("training"))
    assert report.failed == []
    for tree in report.trees:
        leaves = set(tree.leaves())
        for index, segment in enumerate(tree.segments):
            assert segment.routes is not None
            known = (segment.routes >= 0).all(axis=(1, 2))
            assert known[: len(segment) - (index in leaves)].all()


@pytest.mark.usefixtures("one_rank")
def test_trainer_agrees_with_nearly_all_routes(trees: list[RolloutTree], model: Path, job: JobConfig) -> None:
    actor = Actor(job, ModelSpec.from_hf(model), model, optimizer=OptimizerConfig(), total_updates=1)
    packs = pack_trees(trees, supervised_credit(trees), token_budget=200)
    replayed = gaps(trees, split_by_tree(packs, actor.logprobs(packs), trees)).max()
    balance = actor.expert_balance
    assert balance is not None
    leaves = sum(len(tree.leaves()) for tree in trees)
    flat = sum(tree.flat_tokens for tree in trees)
    assert balance.replayed == pytest.approx(1 - leaves / flat)
    assert balance.differing < 0.01
    free = gaps(trees, split_by_tree(packs, actor.logprobs([drop_routes(pack) for pack in packs]), trees)).max()
    assert replayed < 1e-4
    assert replayed <= free + 1e-6
    # Rows of other tokens do not pass for these: the agreement is no accident of so few experts.
    shifted = [replace_routes(tree) for tree in trees]
    actor.logprobs(pack_trees(shifted, supervised_credit(shifted), token_budget=200))
    assert actor.expert_balance is not None
    assert actor.expert_balance.differing > 0.2


def replace_routes(tree: RolloutTree) -> RolloutTree:
    """Shift the routes of each segment by one token."""
    late = [None if s.routes is None else np.roll(s.routes, 1, axis=0) for s in tree.segments]
    again = RolloutTree(tree.task_id, tree.prompt_ids, routes=late[0])
    for segment, routes in zip(tree.segments[1:], late[1:], strict=True):
        again.add(segment.parent, segment.role, segment.token_ids, logprobs=segment.logprobs, routes=routes)
    return again


def gaps(trees: list[RolloutTree], ours: list[np.ndarray]) -> np.ndarray:
    """Return |trainer - engine| log-probs of all MODEL tokens, in nats."""
    found = []
    for tree, values in zip(trees, ours, strict=True):
        ends = np.cumsum([len(segment) for segment in tree.segments])
        for segment, end in zip(tree.segments, ends, strict=True):
            if segment.role is Role.MODEL:
                found.append(np.abs(values[end - len(segment) : end] - segment.logprobs))
    return np.concatenate(found)


async def sample(url: str, spec: ExpertRouteSpec, count: int) -> list[RolloutTree]:
    """Sample answers to random prompts of 60 tokens."""
    rng = np.random.default_rng(0)
    async with EngineClient(url) as client:

        async def answer(prompt: np.ndarray) -> RolloutTree:
            drawn = await client.generate(
                prompt, max_new_tokens=100, sampling=Sampling(), routes=ExpertRouteRequest(0, spec)
            )
            assert drawn.routes is not None
            routes = np.concatenate([drawn.routes, np.full_like(drawn.routes[:1], -1)])
            tree = RolloutTree("sample", prompt, routes=routes[:60])
            tree.add(0, Role.MODEL, drawn.token_ids, logprobs=drawn.logprobs, routes=routes[60:])
            return tree

        return await asyncio.gather(*(answer(prompt) for prompt in rng.integers(3, 28, (count, 60), np.int32)))


@pytest.mark.slow_campaign
@pytest.mark.usefixtures("one_rank")
def test_replay_narrows_the_gap_to_the_engine_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    spec = ExpertRouteSpec(layers=6, top_k=4)
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 6, "hidden_size": 128, "head_dim": 32}
    path = write_mixture(tmp_path / "model", tiny_model, "bfloat16", **sizes)
    with launch_engine(path, ENGINE, dtype="bfloat16", seed=1, log_path=tmp_path / "log", expert_routes=True) as handle:
        trees = asyncio.run(sample(handle.url, spec, 48))
    config = JobConfig(name="test", model=ModelConfig(path=path, dtype="bfloat16"))
    actor = Actor(config, ModelSpec.from_hf(path), path, optimizer=OptimizerConfig(), total_updates=1)
    packs = pack_trees(trees, supervised_credit(trees), token_budget=4096)
    replayed = gaps(trees, split_by_tree(packs, actor.logprobs(packs), trees))
    assert actor.expert_balance is not None
    assert 0.001 < actor.expert_balance.differing < 0.02
    free = gaps(trees, split_by_tree(packs, actor.logprobs([drop_routes(pack) for pack in packs]), trees))
    print(f"gap in nats, replayed and free: mean {replayed.mean():.4f} {free.mean():.4f}", end=", ")
    print(f"largest {replayed.max():.3f} {free.max():.3f}, tokens {len(free)}")
    assert replayed.mean() < free.mean() / 2
    assert replayed.max() < free.max() / 3


def test_cached_tokens_keep_their_routes(
    engine: EngineHandle,
) -> None:
    prompt = [20, 19, 14, 17, 12] * 20

    async def ask() -> None:
        async with EngineClient(engine.url) as client:
            whole = ExpertRouteRequest(0, SHAPE)
            first = await client.generate(prompt, max_new_tokens=9, sampling=Sampling(), routes=whole)
            again = await client.generate(prompt, max_new_tokens=2, sampling=Sampling(), routes=whole)
            rest = await client.generate(
                prompt, max_new_tokens=2, sampling=Sampling(), routes=ExpertRouteRequest(100, SHAPE)
            )
            assert (again.cached_tokens, len(prompt)) == (99, 100)
            assert first.routes is not None
            assert again.routes is not None
            assert rest.routes is not None
            assert first.routes.shape == (100 + len(first.token_ids) - 1, 3, 2)
            assert len(rest.routes) == len(rest.token_ids) - 1
            assert (again.routes[:99] == first.routes[:99]).all()
            cut: list[Generation] = []
            for _ in range(20):  # until a pause meets a request in flight
                drawn = (
                    client.generate(prompt, max_new_tokens=1500, sampling=Sampling(), routes=whole) for _ in "many"
                )
                running = asyncio.gather(*drawn)
                await asyncio.sleep(0.05)
                await client.pause()
                client.resume(0)
                cut += [answer for answer in await running if answer.finish is EngineFinish.CUT_SHORT]
                if cut:
                    break
            assert cut
            assert [answer.routes is not None and len(answer.routes) for answer in cut] == [
                99 + len(answer.token_ids) for answer in cut
            ]

    asyncio.run(ask())


def test_missing_routes_are_an_error(engine: EngineHandle) -> None:
    async def ask() -> None:
        async with EngineClient(engine.url) as client:
            wrong = ExpertRouteRequest(0, ExpertRouteSpec(SHAPE.layers + 1, SHAPE.top_k))
            await client.generate([3, 4, 5], max_new_tokens=2, sampling=Sampling(), routes=wrong)

    with pytest.raises(ValueError, match="expert routes for"):
        asyncio.run(ask())


@pytest.mark.slow_campaign
def test_job_trains_with_the_routes_of_its_engine(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["train.steps=1", "train.tasks_per_step=4", "sft.steps=0", "evaluation.before=false"]
    overrides += ["evaluation.after=false", "algorithm.router_replay=rollout", f"model.path={model}", f"run_dir={run}"]
    command = [sys.executable, "-m", "arpo_megatron", "train", "quickstart", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert row["routes_replayed"] > 0.9
    assert row["routes_differing"] < 0.01
    stored = read_trees(run / "trees" / "step_000001.parquet")
    assert all(segment.routes is not None for item in stored for segment in item.tree.segments)
