"""The real SGLang server: numbers equal to transformers', whole trees through the service, no process left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import requests
import torch

from arpo_megatron.config import AlgorithmConfig, EngineConfig, JobConfig, ModelConfig, RolloutConfig
from arpo_megatron.engine.admin import EngineAdmin
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.launch import EngineHandle, EngineStartError, launch_engine
from arpo_megatron.engine.request import EngineFinish, EngineRefusedError, Generation, Sampling
from arpo_megatron.errors import UserError
from arpo_megatron.rollout.handle import RolloutError, RolloutHandle
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FinishTrees,
    RolloutProgress,
    RolloutSettings,
    ServiceSettings,
    StaleEnginesError,
)
from arpo_megatron.rollout.record import TreeRecord
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Finish, Role, RolloutTree
from tests.rollout.launched import launched_rollouts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the expectations are those of float32 on a CPU")

ENGINE = EngineConfig(max_total_tokens=65536, memory_fraction=0.1, max_running_requests=64, startup_timeout_s=400)
SHARED = Path("/dev/shm")
PROMPT = list(range(13, 28)) * 3
PYTHON_ENDS = {4, 9, 10, 12}  # tokens of the tiny model that hold </python>, two of them with other text around it
SEARCH_ENDS = {6, 11}
T = TypeVar("T")


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """The one server of this file; its end is checked too."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    before = set(SHARED.glob("sglang*"))
    handle = launch_engine(tiny_model, ENGINE, dtype="float32", seed=1, log_path=log)
    server = psutil.Process(handle.process.pid)
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 3  # server, scheduler, detokenizer
    yield handle
    handle.stop()
    assert not handle.alive()
    assert not any(map(lives, family))
    assert not handle.scratch.path.exists()
    assert set(SHARED.glob("sglang*")) <= before
    handle.stop()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[[list[int]], torch.Tensor]:
    """Token ids -> float64[n, V] logits of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).double()

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return logits


def ask(engine: EngineHandle, question: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with EngineClient(engine.url) as client:
            return await question(client)

    return asyncio.run(run())


def test_greedy_equals_transformers(engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor]) -> None:
    drawn = ask(engine, lambda client: client.generate(PROMPT, max_new_tokens=40, sampling=Sampling(0.0)))
    ids = PROMPT + drawn.token_ids.tolist()
    logits = reference(ids)[len(PROMPT) - 1 : -1]
    assert drawn.token_ids.tolist() == logits.argmax(-1).tolist()
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(drawn.token_ids, dtype=torch.int64)[:, None])[:, 0]
    np.testing.assert_allclose(drawn.logprobs, chosen, atol=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_logprobs_and_entropies_are_those_of_the_whole_vocabulary(
    engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor], temperature: float, top_p: float
) -> None:
    async def draw(client: EngineClient) -> list[Generation]:
        sampling = Sampling(temperature, top_p)
        prompts = [PROMPT[: 9 + start] for start in range(12)]  # of different lengths, decoded in one batch
        return await asyncio.gather(
            *(client.generate(prompt, max_new_tokens=30, sampling=sampling) for prompt in prompts)
        )

    for start, drawn in enumerate(ask(engine, draw)):
        prompt = PROMPT[: 9 + start]
        logits = reference(prompt + drawn.token_ids.tolist())[len(prompt) - 1 : -1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        np.testing.assert_allclose(drawn.entropies, distribution.entropy(), atol=1e-4)
        np.testing.assert_allclose(drawn.logprobs, distribution.log_prob(torch.tensor(drawn.token_ids)), atol=1e-4)


def test_scores_are_those_of_transformers_and_ignore_the_cache(
    engine: EngineHandle, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    ids = [*PROMPT, 3, 15, 25, 4]
    expected = reference(ids).log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    engines = EngineAdmin([engine.url], timeout_s=60.0)
    for _ in range(2):
        (scores,) = engines.start_scores(ids)()
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    engines.close()


def test_a_prefilled_prefix_is_served_from_the_cache(engine: EngineHandle) -> None:
    prompt = [20, 19, 14, 17] * 50

    async def fork(client: EngineClient) -> tuple[tuple[int, int], list[int]]:
        first = await client.prefill(prompt)
        drawn = (client.generate(prompt, max_new_tokens=5, sampling=Sampling()) for _ in range(8))
        return first, [part.cached_tokens for part in await asyncio.gather(*drawn)]

    assert ask(engine, fork) == ((200, 0), [199] * 8)


def test_every_end_is_told_apart_and_keeps_its_tokens(engine: EngineHandle) -> None:
    async def draw(client: EngineClient) -> list[Generation]:
        stop = ("</python>", "</search>")
        drawn = (client.generate(PROMPT, max_new_tokens=20, sampling=Sampling(), stop=stop) for _ in range(200))
        return await asyncio.gather(*drawn)

    seen = set()
    for drawn in ask(engine, draw):
        seen.add((drawn.finish, drawn.matched))
        ids = drawn.token_ids.tolist()
        if drawn.finish is EngineFinish.LENGTH:
            assert len(ids) == 20
        elif drawn.finish is EngineFinish.END_TOKEN:
            assert ids[-1] == 1
        else:
            assert ids[-1] in {"</python>": PYTHON_ENDS, "</search>": SEARCH_ENDS}[str(drawn.matched)]
            assert not {1, *PYTHON_ENDS, *SEARCH_ENDS} & set(ids[:-1])
    assert seen == {
        (EngineFinish.LENGTH, None),
        (EngineFinish.END_TOKEN, None),
        (EngineFinish.STOP_STRING, "</python>"),
        (EngineFinish.STOP_STRING, "</search>"),
    }


def test_a_request_that_can_never_succeed_is_refused_at_once(engine: EngineHandle) -> None:
    with pytest.raises(EngineRefusedError, match="HTTP 400"):
        ask(engine, lambda client: client.prefill(PROMPT * 100))


def tasks(count: int) -> list[Task]:
    system = "1 2 3 + 4 * 5 - 6 " * 3
    return [Task(f"task-{number}", (), "1", "math", f"{system}{number} + {7 * number}\n") for number in range(count)]


def test_every_shared_token_is_prefilled_once_on_a_cold_cache(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """Prompts of 150 tokens that nobody has asked before, five first trajectories and seven forks each."""
    settings = RolloutSettings.training(job(branch_probability=1.0, entropy_weight=0.0))
    cold = [
        replace(task, prompt_text=f"{task.prompt_text * 3}{number}\n") for number, task in enumerate(random_tasks(12))
    ]
    for asked in (cold[:1], cold[1:]):  # alone, and many at once
        flush_cache(engine)
        stats = rollouts.grow_trees(asked, step=1, version=0, settings=settings).stats
        assert stats.trees == len(asked)
        assert stats.forks > 0 or len(asked) == 1  # a tree of trajectories without a call has none
        assert stats.prefill_over_unique <= 1.05
        needless = stats.counts.prefilled_tokens - stats.given_tokens
        assert needless <= stats.counts.requests  # the last token of a prompt that is cached otherwise


def random_tasks(count: int) -> list[Task]:
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("0123456789+*- \n"), 40)) for _ in range(count)]
    return [Task(f"random-{number}", (), "1", "math", prompt) for number, prompt in enumerate(prompts)]


def job(**algorithm: Any) -> JobConfig:
    return JobConfig(
        name="test",
        model=ModelConfig(max_length=400),
        algorithm=AlgorithmConfig(**{"group_size": 12, "initial_rollouts": 5, "entropy_tokens": 3} | algorithm),
        rollout=RolloutConfig(max_response_tokens=150, max_tool_tokens=40),
    )


@pytest.fixture
def rollouts(engine: EngineHandle, sandbox_url: str, tiny_model: Path) -> Iterator[RolloutHandle]:
    with launched_rollouts(ServiceSettings((engine.url,), sandbox_url, tiny_model, seed=4)) as handle:
        yield handle


def flush_cache(engine: EngineHandle) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{engine.url}/flush_cache", method="POST")).read()


def test_whole_trees_grow_and_the_cache_serves_what_they_predict(
    engine: EngineHandle, rollouts: RolloutHandle, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    flush_cache(engine)
    seen: list[RolloutProgress] = []
    settings = RolloutSettings.training(job())
    report = rollouts.grow_trees(tasks(8), step=1, version=0, settings=settings, progress=seen.append)
    stats = report.stats
    assert report.failed == []
    assert [tree.task_id for tree in report.trees] == [task.id for task in tasks(8)]
    assert all(len(tree.leaves()) == 12 for tree in report.trees)
    assert stats.trajectories == 96
    assert stats.counts.calls_executed == sum(s.role is Role.TOOL for t in report.trees for s in t.segments) > 10
    assert stats.forks > 0
    assert stats.calls_inherited > 0
    assert abs(stats.cached_share - stats.predicted_cached_share) < 0.1
    assert stats.predicted_prompt_tokens == stats.counts.prompt_tokens
    assert (seen[-1].trees_done, seen[-1].trees_total) == (8, 8)
    assert seen[-1].tokens_sampled == stats.counts.tokens_sampled
    for tree in report.trees:
        check_tree(tree, reference)


def test_greedy_trees_are_the_same_whatever_grows_beside_them(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """Three times, with other trees in the batch and in another order: tokens, forks and draws do not move."""
    settings = replace(RolloutSettings.training(job(group_size=6, initial_rollouts=2)), sampling=Sampling(0.0))
    asked, grown = random_tasks(36), []
    for others in range(3):
        flush_cache(engine)
        crowd = [*tasks(4 * others), *asked[11 * others :], *asked[: 11 * others]]
        report = rollouts.grow_trees(crowd, step=1, version=0, settings=settings)
        trees = {tree.task_id: tree for tree in report.trees}
        grown.append([decided(trees[task.id]) for task in asked])
    assert grown[0] == grown[1] == grown[2]
    assert sum(branch is not None for tree in grown[0] for *_, branch in tree) > 5


def decided(tree: RolloutTree) -> list[tuple[Any, ...]]:
    """Tokens and decisions, without what another batch moves in the last bits."""
    return [
        (s.parent, s.token_ids.tolist(), s.finish, s.branch and (s.branch.draw, s.branch.why)) for s in tree.segments
    ]


def check_tree(tree: RolloutTree, reference: Callable[[list[int]], torch.Tensor]) -> None:
    """Roles alternate, versions are recorded, and log-probs are those of the path the token is on."""
    for index, segment in enumerate(tree.segments[1:], start=1):
        above = tree.segments[segment.parent]
        if segment.role is Role.TOOL:
            assert above.finish is Finish.TOOL_CALL
            continue
        assert above.role in (Role.PROMPT, Role.TOOL)
        assert segment.policy_version == 0
        assert segment.logprobs is not None
        assert (segment.finish is Finish.TOOL_CALL) == (index not in tree.leaves())
    leaf = tree.leaves()[-1]
    trajectory = tree.trajectory(leaf)
    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    scores = reference(ids.tolist()).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
    sampled = trajectory.loss_mask[1:] == 1
    np.testing.assert_allclose(trajectory.logprobs[1:][sampled], scores[sampled], atol=1e-4)


def set_version(engine: EngineHandle, version: int) -> None:
    """What the last bucket of a push does besides loading weights. Needs an idle engine."""
    flush_cache(engine)
    body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{engine.url}/update_weight_version", body, headers)).read()


def test_trees_survive_a_push_wherever_it_meets_them(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """Greedy trees that are paused again and again are those that are not, but for the versions of their pieces."""
    settings = RolloutSettings.evaluation(job(), temperature=0.0)
    asked = random_tasks(200)
    drawn = rollouts.grow_trees(asked, step=1, version=0, settings=settings).trees
    whole = [tree for tree in drawn if tree.unique_tokens > 120][:16]
    assert len(whole) == 16, "too few long answers"
    chosen = tuple(asked[int(tree.task_id.removeprefix("random-"))] for tree in whole)
    rollouts.start_trees("training", chosen, step=1, version=0, settings=settings)
    try:
        last, give_up = 0, time.monotonic() + 120
        while len(versions_cut_short(rollouts)) < 3:
            assert time.monotonic() < give_up, "no push met a generation"
            last += 1
            # Often, for whole trees may take no longer than half a second; longer where that is too often for a token.
            time.sleep(0.02 * (1 + last % 5) * (1 + last // 50))
            rollouts.pause()
            set_version(engine, last)  # fails where a request lives
            rollouts.resume(last)
        report = rollouts.collect(CollectTrees("training"))
        rollouts.discard_collected("training")
    finally:
        set_version(engine, 0)
        rollouts.resume(0)
    assert report.failed == []
    assert [trajectories(tree) for tree in report.trees] == [trajectories(tree) for tree in whole]
    versions = {segment.policy_version for tree in report.trees for segment in tree.segments}
    assert len(versions) > 2, "no push met a tree"
    continued = [
        (tree.segments[segment.parent], segment)
        for tree in report.trees
        for segment in tree.segments
        if segment.role is Role.MODEL and tree.segments[segment.parent].role is Role.MODEL
    ]
    assert continued, "no push met a generation"
    assert all(old.policy_version < new.policy_version and old.finish is None for old, new in continued)


def test_trees_that_a_push_waits_for_are_sampled_by_one_policy(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """`rollout.across_push=drain`: the trees above, finished before the engine is paused."""
    settings = RolloutSettings.evaluation(job(), temperature=0.0)
    asked = random_tasks(60)
    whole = rollouts.grow_trees(asked, step=1, version=0, settings=settings).trees
    rollouts.start_trees("training", asked, step=1, version=0, settings=settings)
    seen: list[RolloutProgress] = []
    try:
        rollouts.finish_trees(FinishTrees("training"), seen.append)
        rollouts.pause()
        set_version(engine, 1)
        rollouts.resume(1)
        assert versions_cut_short(rollouts) == set()
        report = rollouts.collect(CollectTrees("training"))
        rollouts.discard_collected("training")
    finally:
        set_version(engine, 0)
        rollouts.resume(0)
    assert {progress.trees_total for progress in seen} == {60}
    assert report.failed == []
    assert [trajectories(tree) for tree in report.trees] == [trajectories(tree) for tree in whole]
    sampled = {s.policy_version for tree in report.trees for s in tree.segments if s.role is Role.MODEL}
    assert sampled == {0}


def versions_cut_short(rollouts: RolloutHandle) -> set[int]:
    """Versions of the policy whose generations a pause has met, with tokens sampled already."""
    records = [TreeRecord.from_entries(tree.entries) for tree in rollouts.unfinished_trees("training")]
    parts = [part for record in records for parts in record.generations.values() for part in parts]
    return {part.weight_version for part in parts if part.finish is EngineFinish.CUT_SHORT and len(part.token_ids)}


def trajectories(tree: RolloutTree) -> list[list[int]]:
    return [tree.path_tokens(leaf).tolist() for leaf in tree.leaves()]


def test_finished_trees_are_given_away_before_the_others_oldest_first(rollouts: RolloutHandle) -> None:
    settings = RolloutSettings.training(job())
    rollouts.start_trees("training", tasks(8), step=0, version=0, settings=settings)
    first = rollouts.collect(CollectTrees("training", count=3))
    rollouts.start_trees("training", tasks(10)[8:], step=1, version=0, settings=settings)
    rest = rollouts.collect(CollectTrees("training"))
    assert len(first.trees) == 3
    assert first.stats.trees == 3
    assert sorted(tree.task_id for tree in [*first.trees, *rest.trees]) == [task.id for task in tasks(10)]
    kept = rollouts.unfinished_trees("training")
    assert [tree.task_id for tree in kept] == [task.id for task in tasks(10)]
    assert all(tree.entries for tree in kept)
    rollouts.discard_collected("training")
    assert rollouts.unfinished_trees("training") == []


def test_independent_trajectories_are_grown_for_evaluation(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    greedy = RolloutSettings.evaluation(job(), temperature=0.0)
    report = rollouts.grow_trees(tasks(3), step=0, version=0, settings=greedy)
    assert [len(tree.leaves()) for tree in report.trees] == [1, 1, 1]
    again = rollouts.grow_trees(tasks(3), step=9, version=0, settings=greedy)
    for first, second in zip(report.trees, again.trees, strict=True):
        assert first.path_tokens(first.leaves()[0]).tolist() == second.path_tokens(second.leaves()[0]).tolist()


def test_trees_of_an_engine_with_older_weights_wait_for_a_push(
    engine: EngineHandle, sandbox_url: str, tiny_model: Path
) -> None:
    settings = ServiceSettings((engine.url,), sandbox_url, tiny_model, seed=4, retry_for_s=30.0)
    with launched_rollouts(settings) as rollouts:
        rollouts.start_trees("training", tasks(2), step=1, version=1, settings=RolloutSettings.training(job()))
        with pytest.raises(StaleEnginesError, match=engine.url):
            rollouts.collect(CollectTrees("training"))
        rollouts.pause()
        set_version(engine, 1)
        rollouts.resume(1)
        report = rollouts.collect(CollectTrees("training"))
        set_version(engine, 0)
    assert report.failed == []
    assert all(s.policy_version == 1 for tree in report.trees for s in tree.segments if s.role is Role.MODEL)


def test_a_tree_that_cannot_be_finished_is_reported_not_returned(sandbox_url: str, tiny_model: Path) -> None:
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4, retry_for_s=0.3)
    with launched_rollouts(settings) as handle:
        report = handle.grow_trees(tasks(2), step=0, version=0, settings=RolloutSettings.training(job()))
    assert report.trees == []
    assert [each.tree.task_id for each in report.failed] == ["task-0", "task-1"]
    assert all("does not answer" in each.reason for each in report.failed)
    assert report.stats.failed == 2


def test_a_call_that_waits_for_services_can_be_given_up(sandbox_url: str, tiny_model: Path) -> None:
    """Nothing comes back, but `progress` is called, so that the caller learns of services that are gone for good."""
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4, retry_for_s=300)

    def give_up(progress: RolloutProgress) -> None:
        assert progress.trees_done == 0
        if time.monotonic() > started + 1:
            raise InterruptedError

    with launched_rollouts(settings) as handle, pytest.raises(InterruptedError):
        started = time.monotonic()
        handle.grow_trees(tasks(1), step=0, version=0, settings=RolloutSettings.training(job()), progress=give_up)
    assert time.monotonic() - started < 100


def test_a_broken_rollout_process_is_an_error_with_its_traceback(sandbox_url: str, tiny_model: Path) -> None:
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4)
    with launched_rollouts(settings) as handle:
        not_a_task: Any = "not a task"
        with pytest.raises(RolloutError, match=r"(?s)Traceback.*AttributeError"):
            handle.grow_trees([not_a_task], step=0, version=0, settings=RolloutSettings.training(job()))
        with pytest.raises(RolloutError, match=r"(?s)failed before.*AttributeError"):
            handle.grow_trees(tasks(1), step=0, version=0, settings=RolloutSettings.training(job()))
    nowhere = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model / "nowhere", seed=4)
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"), launched_rollouts(nowhere):
        pass


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    with pytest.raises(UserError, match=r"config\.json is missing"):
        launch_engine(tmp_path, ENGINE, dtype="float32", seed=1, log_path=log)
    (tmp_path / "config.json").write_text('{"model_type": "a-model-nobody-knows"}')
    with pytest.raises(EngineStartError, match="ended with code") as error:
        launch_engine(tmp_path, ENGINE, dtype="float32", seed=1, log_path=log)
    assert str(log) in str(error.value)
    assert "a-model-nobody-knows" in str(error.value)
    assert engine_processes(str(tmp_path)) == []


LAUNCHER = """
import sys
from pathlib import Path
from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.rollout.messages import ServiceSettings
from tests.rollout.launched import launched_rollouts
model, log = map(Path, sys.argv[1:])
config = EngineConfig(max_total_tokens=4096, memory_fraction=0.1, startup_timeout_s=400)
launched = launched_rollouts(ServiceSettings(("http://127.0.0.1:9",), "http://127.0.0.1:9", model, seed=1))
rollouts = launched.__enter__()
print("launching", flush=True)
engine = launch_engine(model, config, dtype="float32", seed=1, log_path=log)
print("ready", flush=True)
sys.stdin.read()
"""


def engine_processes(word: str) -> list[psutil.Process]:
    """Processes of an engine or rollout service that have `word` on their command line, or descend from such."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if "arpo_megatron.rollout." in line and word in line:
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return found


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("moment", ["while it starts", "when it serves"])
def test_nothing_survives_a_killed_launcher(tiny_model: Path, tmp_path: Path, moment: str) -> None:
    model = tmp_path / "model"
    model.symlink_to(tiny_model)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(model), str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # helper modules of the tests, too
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline() == "launching\n"
        if moment == "when it serves":
            assert launcher.stdout.readline() == "ready\n"
        else:
            time.sleep(3)
        give_up, least = time.monotonic() + 60, 4 if moment == "when it serves" else 2
        while len(family := psutil.Process(launcher.pid).children(recursive=True)) < least:
            assert time.monotonic() < give_up, family
            time.sleep(0.05)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdin.close()
        launcher.stdout.close()
    # Also those that the family has started since.
    _gone, alive = psutil.wait_procs([*family, *engine_processes(str(model))], timeout=60)
    assert [process for process in alive if lives(process)] == []
    assert engine_processes(str(model)) == []


def test_a_version_other_than_the_checked_one_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from arpo_megatron.engine.server.cpu import install_stubs

    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "9.9.9")
    with pytest.raises(UserError, match=r"0\.5\.18, but 9\.9\.9"):
        install_stubs()


def test_the_probe_notices_a_detokenizer_that_hangs(engine: EngineHandle) -> None:
    def alive(timeout_s: float) -> int:
        return requests.get(engine.program.url + engine.program.alive, timeout=timeout_s).status_code

    (detokenizer,) = [
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if "detokenizer" in " ".join(child.cmdline())
    ]
    assert alive(60) == 200
    detokenizer.suspend()
    try:
        assert requests.get(f"{engine.url}/server_info", timeout=60).status_code == 200
        with pytest.raises(requests.Timeout):
            alive(1)
    finally:
        detokenizer.resume()
    assert alive(60) == 200
    assert ask(engine, lambda client: client.prefill(PROMPT))[0] == len(PROMPT)


def test_metrics_are_served(engine: EngineHandle) -> None:
    with urllib.request.urlopen(f"{engine.url}/metrics") as answer:
        assert b"sglang:cached_tokens_total" in answer.read()
    with urllib.request.urlopen(f"{engine.url}/server_info") as answer:
        info = json.load(answer)
    assert (info["device"], info["attention_backend"], info["page_size"]) == ("cpu", "torch_native", 1)
