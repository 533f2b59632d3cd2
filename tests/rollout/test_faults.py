"""Faults of all services while trees grow: every tree arrives once and equals the tree that grows without faults.

Real engines and the real tool service are supervised as in a job. The faults come in an order drawn by the seed, spread
evenly over the sampling. Tools are slow with a heavy tail throughout, and a search always answers 10 MB. `make test`
has 8 faults in 36 trees, without SGLang's router, as jobs are by default; the campaign has 20 faults in 512 trees,
with and without the router.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

from arpo_megatron.config import AlgorithmConfig, JobConfig, ModelConfig, RolloutConfig
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.wire.endpoints import HEALTH_PATH, bearer
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import read_health
from arpo_megatron.monitor.tree_store import TreeLog, read_trees, step_file
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import RolloutProgress, RolloutReport, RolloutSettings
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree
from tests.faults import CutProxy, ToolProxy
from tests.rollout.fleet import ENGINES, TOKEN, Fleet, started_fleet

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the expectations are those of float32 on a CPU"),
    pytest.mark.timeout(600),
]

TREES, CAMPAIGN_TREES = 36, 512
FAULTS = {
    "kill an engine": 1,
    "stop an engine": 1,
    "kill the rollout process": 1,
    "cut the connections": 1,
    "kill the tool service": 1,
    "HTTP 500 from tools": 2,
    "slow tools": 1,
}
CAMPAIGN_FAULTS = {
    "kill an engine": 2,
    "stop an engine": 1,
    "kill the router": 1,
    "stop the router": 1,
    "kill the rollout process": 1,
    "stop the rollout process": 1,
    "cut the connections": 3,
    "kill the tool service": 2,
    "stop the tool service": 1,
    "HTTP 500 from tools": 4,
    "slow tools": 3,
}
JOB = JobConfig(
    name="test",
    model=ModelConfig(max_length=400),
    algorithm=AlgorithmConfig(group_size=4, initial_rollouts=1, entropy_tokens=3),
    # A timeout is a result and would make another tree; a busy machine must not cause one.
    rollout=RolloutConfig(max_response_tokens=120, max_tool_calls=2, max_tool_tokens=24, tool_timeout_s=600.0),
)


@pytest.fixture(scope="module")
def tool_calling_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, changed so that greedy decoding calls tools."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("talkative") / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[[3, 4, 5, 6, 7, 8, 12]] = 0.0  # bare tags
    head[[9, 10, 11]] *= 1.5  # whole calls
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def fleet(tool_calling_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started_fleet(tool_calling_model, tmp_path_factory.mktemp("run")) as fleet:
        yield fleet


def tasks(count: int) -> list[Task]:
    draw = random.Random(0)
    questions = ["".join(draw.choices("0123456789+-*", k=30)) for _ in range(count)]
    return [
        Task(f"task-{i}", (), "1", "math", f"{'1 2 3 + 4 * ' * 3}{question}\n") for i, question in enumerate(questions)
    ]


def grow(handle: RolloutHandle, count: int, progress: Callable[[RolloutProgress], None] | None = None) -> RolloutReport:
    settings = replace(RolloutSettings.training(JOB), sampling=Sampling(0.0))
    return handle.grow_trees(tasks(count), step=1, version=0, settings=settings, progress=progress)


class Saboteur:
    """Causes faults one after the other, at equal shares of the sampled tokens."""

    def __init__(
        self,
        fleet: Fleet,
        cuts: list[CutProxy],
        tools: ToolProxy,
        faults: Mapping[str, int],
        *,
        tokens: int,
        seed: int,
    ) -> None:
        self._fleet, self._cuts, self._tools = fleet, cuts, tools
        self._draw = random.Random(seed)
        names = [name for name, count in faults.items() for _ in range(count)]
        self._draw.shuffle(names)
        # The last fault is early enough for its service to be in use.
        self._due = [(round(0.9 * tokens * (i + 0.5) / len(names)), name) for i, name in enumerate(names)]
        self._hit: set[int] = set()
        self.done: list[str] = []

    def __call__(self, progress: RolloutProgress) -> None:
        for fault in [fault for fault in self._due if fault[0] <= progress.tokens_sampled]:
            if self._do(fault[1]):  # otherwise the service is down; try again at the next call
                self._due.remove(fault)
                self.done.append(fault[1])

    def _do(self, name: str) -> bool:
        engines = [f"engine-{index}" for index in self._draw.sample(range(ENGINES), ENGINES)]
        match name:
            case "kill an engine":
                return self._signal(engines, signal.SIGKILL)
            case "stop an engine":
                return self._signal(engines, signal.SIGSTOP)
            case "kill the router":
                return self._signal(["router"], signal.SIGKILL)
            case "stop the router":
                return self._signal(["router"], signal.SIGSTOP)
            case "kill the rollout process":
                return self._signal(["rollout"], signal.SIGKILL)
            case "stop the rollout process":
                return self._signal(["rollout"], signal.SIGSTOP)
            case "kill the tool service":
                return self._signal(["sandbox"], signal.SIGKILL)
            case "stop the tool service":
                return self._signal(["sandbox"], signal.SIGSTOP)
            case "cut the connections":
                for cut in self._cuts:
                    cut.cut_soon()
            case "HTTP 500 from tools":
                self._tools.failures_left = 3
            case "slow tools":
                self._tools.slow_left = 3
        return True

    def _signal(self, processes: list[str], number: signal.Signals) -> bool:
        """Signal the first process that is up and was not hit before (it may be dying, or hang unnoticed)."""
        for pid in map(self._fleet.pid, processes):
            if pid is not None and pid not in self._hit:
                self._hit.add(pid)
                os.kill(pid, number)
                return True
        return False


def content(tree: RolloutTree) -> list[Any]:
    """Return all of a tree except its times and log-probs."""
    return [
        (
            segment.role,
            segment.parent,
            segment.token_ids.tolist(),
            segment.policy_version,
            segment.finish,
            segment.tool and (segment.tool.name, dict(segment.tool.arguments), segment.tool.status),
            segment.branch and (segment.branch.draw, segment.branch.why),
        )
        for segment in tree.segments
    ]


def check_equal(found: RolloutReport, expected: RolloutReport) -> None:
    assert found.failed == []
    assert [tree.task_id for tree in found.trees] == [tree.task_id for tree in expected.trees]
    for one, other in zip(found.trees, expected.trees, strict=True):
        assert content(one) == content(other)
        for ours, theirs in zip(one.segments, other.segments, strict=True):
            if ours.role is Role.MODEL:
                assert ours.logprobs is not None
                assert theirs.logprobs is not None
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert found.stats.totals.forks == expected.stats.totals.forks
    assert found.stats.counts.tokens_sampled == expected.stats.counts.tokens_sampled
    assert found.stats.counts.calls_executed == expected.stats.counts.calls_executed


def check_cached(report: RolloutReport) -> None:
    """Check that fork points were in the cache of their siblings' engine, as with one engine."""
    assert report.failed == []
    assert report.stats.cached_share > report.stats.predicted_cached_share - 0.005


def check_undisturbed(report: RolloutReport) -> None:
    """Check that the trees are such as the campaign needs."""
    check_cached(report)
    stats = report.stats
    assert stats.counts.calls_executed > 2 * stats.trees
    assert stats.totals.forks > stats.trees // 4
    assert {segment.tool.name for tree in report.trees for segment in tree.segments if segment.tool} == {
        "python",
        "search",
    }


def campaign(fleet: Fleet, expected: RolloutReport, faults: Mapping[str, int], *, routed: bool, seed: int) -> None:
    check_undisturbed(expected)
    restarts_before = fleet.restarts()
    with fleet.rollouts(routed=routed, seed=seed) as (handle, cuts, tools):
        saboteur = Saboteur(fleet, cuts, tools, faults, tokens=expected.stats.counts.tokens_sampled, seed=seed)
        found = grow(handle, len(expected.trees), saboteur)
    check_equal(found, expected)
    assert Counter(saboteur.done) == Counter(faults)
    assert found.stats.counts.retries > 0
    killed = sum(count for name, count in faults.items() if name.startswith(("kill", "stop")))
    deadline = time.monotonic() + 300
    while not all(role.up for role in read_health(fleet.run)) or fleet.restarts() - restarts_before < killed:
        assert time.monotonic() < deadline, read_health(fleet.run)
        time.sleep(0.1)
    fleet.supervisor.check()
    check_stored(found.trees, fleet.run)


def check_stored(trees: Sequence[RolloutTree], run: RunDirectory) -> None:
    """Check that all trees can be stored and read."""
    shutil.rmtree(run.trees, ignore_errors=True)
    assert TreeLog(run, print).store(1, [scored(tree) for tree in trees], str) == 0
    assert [item.tree.to_dict() for item in read_trees(step_file(run, 1))] == [tree.to_dict() for tree in trees]


def scored(tree: RolloutTree) -> ScoredTree:
    count = len(tree.leaves())
    task = Task(tree.task_id, (), "1", "math", "")
    return ScoredTree(task, tree, np.zeros(count), np.zeros(count), np.zeros(count, bool))


def test_servers_refuse_requests_without_the_token(fleet: Fleet) -> None:
    """Otherwise anyone who can reach an engine could replace the policy's weights or release its memory."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    posts = {
        "update_weights_from_disk": {"model_path": str(fleet.model)},
        "update_weights_from_tensor": {"serialized_named_tensors": []},
        "init_weights_update_group": {},
        "release_memory_occupation": {},
        "abort_request": {"abort_all": True},
        "flush_cache": {},
        "arpo/begin_push": {"version": 1, "timeout_s": 1},
        "arpo/commit_push": {"version": 0, "loads": 1, "timeout_s": 1},
        "generate": body,
    }
    routers = {"generate": body, "flush_cache": {}, "workers": {"url": "http://127.0.0.1:1"}}
    gets = {"model_info": {}, "server_info": {}}
    for program in (*fleet.engines, fleet.router):
        of_router = program is fleet.router
        asked = [("POST", path, body) for path, body in (routers if of_router else posts).items()]
        asked += [("GET", "workers", {})] if of_router else [("GET", path, body) for path, body in gets.items()]
        for method, path, given in asked:
            for headers in ({}, bearer("another")):
                answer = requests.request(method, f"{program.url}/{path}", json=given, headers=headers, timeout=10)
                assert answer.status_code == 401, (program.name, method, path, answer.text)
        answer = requests.post(f"{program.url}/generate", json=body, headers=bearer(TOKEN), timeout=30)
        assert answer.status_code == 200, answer.text
        probe = program.ready if of_router else HEALTH_PATH
        assert requests.get(f"{program.url}{probe}", timeout=10).status_code == 200
        assert TOKEN not in " ".join(program.command) and TOKEN not in program.log.read_text()
        assert "401 Client Error" not in program.log.read_text(), "a server does not know its own token"
    urls = [engine.url for engine in fleet.engines]
    with pytest.raises(WeightPushError, match="HTTP 401"):
        EngineAdmin(urls, 10.0).begin_push(1)
    known = EngineAdmin(urls, 10.0, TOKEN)
    known.wait_until_up(5.0)
    assert all(len(logprobs) == 2 for logprobs in known.start_logprobs([5, 6, 7])())


def grow_undisturbed(fleet: Fleet, count: int) -> RolloutReport:
    """Grow trees without faults, divided among the engines by their keys."""
    with fleet.rollouts(routed=False, seed=0) as (handle, _, _):
        return grow(handle, count)


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> RolloutReport:
    return grow_undisturbed(fleet, TREES)


def test_router_keeps_each_tree_on_one_engine(fleet: Fleet, undisturbed: RolloutReport) -> None:
    for engine in fleet.engines:
        requests.post(f"{engine.url}/flush_cache", headers=bearer(TOKEN), timeout=10).raise_for_status()
    with fleet.rollouts(routed=True, seed=0) as (handle, _, _):
        report = grow(handle, TREES // 2)
    check_cached(report)
    assert list(map(content, report.trees)) == list(map(content, undisturbed.trees[: TREES // 2]))


def test_trees_are_the_same_with_faults_in_all_services(fleet: Fleet, undisturbed: RolloutReport) -> None:
    # With this seed the rollout process, which counts retries, is killed first.
    campaign(fleet, undisturbed, FAULTS, routed=False, seed=26)


@pytest.fixture(scope="module")
def undisturbed_campaign(fleet: Fleet) -> RolloutReport:
    return grow_undisturbed(fleet, CAMPAIGN_TREES)


@pytest.mark.slow_campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 8))
def test_trees_are_the_same_with_twenty_faults(
    tool_calling_model: Path, undisturbed_campaign: RolloutReport, tmp_path: Path, seed: int
) -> None:
    with started_fleet(
        tool_calling_model, tmp_path
    ) as fresh:  # its restarts have no history, so their pauses are short
        campaign(fresh, undisturbed_campaign, CAMPAIGN_FAULTS, routed=seed == 1 or seed % 2 == 0, seed=seed)
