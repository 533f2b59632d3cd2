"""Whole trees from the real SGLang server and the real tool service."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.config import AlgorithmConfig, JobConfig, ModelConfig, RolloutConfig
from arpo_megatron.engine.launch import EngineHandle
from arpo_megatron.engine.request import EngineFinish, Sampling
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


def tasks(count: int) -> list[Task]:
    system = "1 2 3 + 4 * 5 - 6 " * 3
    return [Task(f"task-{number}", (), "1", "math", f"{system}{number} + {7 * number}\n") for number in range(count)]


def test_shared_tokens_are_prefilled_once(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """New prompts of 150 tokens, each with five initial trajectories and seven forks."""
    settings = RolloutSettings.training(job(branch_probability=1.0, entropy_weight=0.0))
    cold = [
        replace(task, prompt_text=f"{task.prompt_text * 3}{number}\n") for number, task in enumerate(random_tasks(12))
    ]
    for asked in (cold[:1], cold[1:]):  # alone, and many at once
        flush_cache(engine)
        stats = rollouts.grow_trees(asked, step=1, version=0, settings=settings).stats
        assert stats.trees == len(asked)
        assert stats.totals.forks > 0 or len(asked) == 1  # a tree of trajectories without a call has none
        assert stats.prefill_over_unique <= 1.05
        needless = stats.counts.prefilled_tokens - stats.totals.given_tokens
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
    """Empty the engine's cache. It refuses that until it has noticed that its last request has ended."""
    for attempt in range(50):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{engine.url}/flush_cache", method="POST")).read()
            return
        except urllib.error.HTTPError:
            if attempt == 49:
                raise
            time.sleep(0.2)


def test_trees_grow_and_the_cache_serves_the_predicted_share(
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
    assert stats.totals.trajectories == 96
    assert stats.counts.calls_executed == sum(s.role is Role.TOOL for t in report.trees for s in t.segments) > 10
    assert stats.totals.forks > 0
    assert stats.totals.calls_inherited > 0
    assert abs(stats.cached_share - stats.predicted_cached_share) < 0.1
    assert stats.totals.predicted_prompt_tokens == stats.counts.prompt_tokens
    assert (seen[-1].trees_done, seen[-1].trees_total) == (8, 8)
    assert seen[-1].tokens_sampled == stats.counts.tokens_sampled
    for tree in report.trees:
        check_tree(tree, reference)


def test_greedy_trees_do_not_depend_on_the_batch(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """Tokens, forks and draws are equal with other trees in the batch and in another order."""
    settings = replace(RolloutSettings.training(job(group_size=6, initial_rollouts=2)), sampling=Sampling(0.0))
    asked, grown = random_tasks(24), []
    for others in range(2):
        flush_cache(engine)
        crowd = [*tasks(4 * others), *asked[11 * others :], *asked[: 11 * others]]
        report = rollouts.grow_trees(crowd, step=1, version=0, settings=settings)
        trees = {tree.task_id: tree for tree in report.trees}
        grown.append([decided(trees[task.id]) for task in asked])
    assert grown[0] == grown[1]
    assert sum(branch is not None for tree in grown[0] for *_, branch in tree) > 3


def decided(tree: RolloutTree) -> list[tuple[Any, ...]]:
    """Return tokens and decisions, without the last bits that depend on the batch."""
    return [
        (s.parent, s.token_ids.tolist(), s.finish, s.branch and (s.branch.draw, s.branch.why)) for s in tree.segments
    ]


def check_tree(tree: RolloutTree, reference: Callable[[list[int]], torch.Tensor]) -> None:
    """Check roles, versions, and the log-probs of one path."""
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
    """Set the version of an idle engine, as the end of a push does."""
    flush_cache(engine)
    body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{engine.url}/update_weight_version", body, headers)).read()


def test_trees_continue_across_pushes(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """Greedy trees with pauses equal those without, except for the versions of their segments."""
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


def test_finished_trees_are_sampled_by_one_policy(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    """`rollout.across_push=drain`: trees are finished before the engine is paused."""
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
    """Return the policy versions of generations that a pause cut short after some tokens."""
    records = [TreeRecord.from_entries(tree.entries) for tree in rollouts.unfinished_trees("training")]
    parts = [part for record in records for parts in record.generations.values() for part in parts]
    return {part.weight_version for part in parts if part.finish is EngineFinish.CUT_SHORT and len(part.token_ids)}


def trajectories(tree: RolloutTree) -> list[list[int]]:
    return [tree.path_tokens(leaf).tolist() for leaf in tree.leaves()]


def test_collect_returns_finished_trees_first(rollouts: RolloutHandle) -> None:
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


def test_evaluation_grows_independent_trajectories(engine: EngineHandle, rollouts: RolloutHandle) -> None:
    greedy = RolloutSettings.evaluation(job(), temperature=0.0)
    report = rollouts.grow_trees(tasks(3), step=0, version=0, settings=greedy)
    assert [len(tree.leaves()) for tree in report.trees] == [1, 1, 1]
    again = rollouts.grow_trees(tasks(3), step=9, version=0, settings=greedy)
    for first, second in zip(report.trees, again.trees, strict=True):
        assert first.path_tokens(first.leaves()[0]).tolist() == second.path_tokens(second.leaves()[0]).tolist()


def test_trees_wait_for_a_push_to_an_engine_with_old_weights(
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


def test_unfinished_tree_is_reported_as_failed(sandbox_url: str, tiny_model: Path) -> None:
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4, retry_for_s=0.3)
    with launched_rollouts(settings) as handle:
        report = handle.grow_trees(tasks(2), step=0, version=0, settings=RolloutSettings.training(job()))
    assert report.trees == []
    assert [each.tree.task_id for each in report.failed] == ["task-0", "task-1"]
    assert all("does not answer" in each.reason for each in report.failed)
    assert report.stats.failed == 2


def test_progress_callback_can_interrupt_a_call(sandbox_url: str, tiny_model: Path) -> None:
    """`progress` is called even if no service answers, so the caller can notice that they are gone."""
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4, retry_for_s=300)

    def give_up(progress: RolloutProgress) -> None:
        assert progress.trees_done == 0
        if time.monotonic() > started + 1:
            raise InterruptedError

    with launched_rollouts(settings) as handle, pytest.raises(InterruptedError):
        started = time.monotonic()
        handle.grow_trees(tasks(1), step=0, version=0, settings=RolloutSettings.training(job()), progress=give_up)
    assert time.monotonic() - started < 100


def test_error_of_the_rollout_process_has_its_traceback(sandbox_url: str, tiny_model: Path) -> None:
    settings = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model, seed=4)
    with launched_rollouts(settings) as handle:
        not_a_task: Any = "not a task"
        with pytest.raises(RolloutError, match=r"(?s)Traceback.*AttributeError"):
            handle.grow_trees([not_a_task], step=0, version=0, settings=RolloutSettings.training(job()))
        with pytest.raises(RolloutError, match=r"(?s)already failed.*AttributeError"):
            handle.grow_trees(tasks(1), step=0, version=0, settings=RolloutSettings.training(job()))
    nowhere = ServiceSettings(("http://127.0.0.1:9",), sandbox_url, tiny_model / "nowhere", seed=4)
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"), launched_rollouts(nowhere):
        pass
