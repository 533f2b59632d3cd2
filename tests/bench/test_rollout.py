"""`arpo bench rollout`, shortened: every schedule finishes all its trajectories on a real engine."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.bench import controller, pressure, rollout
from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.accounting import RolloutCounts, rollout_stats
from arpo_megatron.rollout.messages import CollectTrees, RolloutReport, StartTrees
from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.trainer.collector import TreeCollector
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import Role, RolloutTree


@pytest.mark.slow_campaign
def test_schedules_finish_all_trajectories_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "STEPS", 2)
    monkeypatch.setattr(rollout, "TASKS", 2)
    monkeypatch.setattr(rollout, "LATENCIES", {"heavy_tail": rollout.LATENCIES["heavy_tail"]})
    monkeypatch.setattr(controller, "TREES", (16, 64))
    monkeypatch.setattr(pressure, "TASKS", 3)
    monkeypatch.setattr(pressure, "STEPS", 1)
    monkeypatch.setattr(pressure, "TOOL_SHARE", 0.02)
    found = rollout.bench_rollout(full=True, progress=False)
    assert {way: run["trajectories"] for way, run in found["runs"]["heavy_tail"].items()} == {
        "rounds": 32,
        "on_policy": 32,
        "partial": 32,
    }
    assert found["prefill_over_unique"] <= 1.05
    on_policy = found["runs"]["heavy_tail"]["on_policy"]
    needless = on_policy["computed"] - on_policy["given"]
    assert needless <= on_policy["requests"]  # the last token of an otherwise cached prompt
    # Two tasks per step overlap less, and other load adds noise: the full benchmark is far from these bounds
    # (docs/reference/performance.md).
    assert found["speedup_heavy_tail"] > 1.2
    small, large = found["controller"]["sizes"]
    assert (small["trajectories"], large["trajectories"]) == (256, 1024)
    # The cost of a segment must not grow with the number of trajectories; quadratic cost would give 8.
    assert found["controller"]["growth"] <= 3
    assert found["controller"]["lost"] == 0
    runs = found["pressure"]["runs"]
    assert runs["admission"]["requests"] < runs["independent"]["requests"], "a fork point is one request, not two"
    assert found["reprefill_pressure"] < 1.3
    assert found["pressure"]["reprefill_pressure_baseline"] > 1.5
    assert found["client_ms_16k"] > 0


def test_tasks_share_no_prompt_prefix(tmp_path: Path) -> None:
    write_model(tmp_path)
    codec = TokenizerCodec(tmp_path)
    prompts = [codec.encode(rollout._task(number).prompt_text) for number in range(rollout.TASKS * rollout.STEPS)]
    unknown = codec.encode("nowhere")
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({prompt[0] for prompt in prompts}) == len(prompts)  # no common first token
    assert not any(unknown[0] in prompt for prompt in prompts)


def test_tool_latencies_have_mean_one() -> None:
    import numpy as np

    for name, draw in rollout.LATENCIES.items():
        rng = np.random.default_rng(1)
        assert np.mean([draw(rng) for _ in range(20000)]) == pytest.approx(1.0, abs=0.05), name


class RecordingHandle:
    """A rollout handle that finishes trees at once and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None, int | None]] = []
        self.in_flight: list[Task] = []

    def unfinished_trees(self, _purpose: str) -> list[UntrainedTree]:
        return []

    def start_trees(self, _purpose: str, tasks: Sequence[Task], **_how: object) -> None:
        self.in_flight += tasks
        if self.calls and self.calls[-1][0] == "start":  # the benchmark starts all trees of a step together
            self.calls[-1] = ("start", (self.calls[-1][1] or 0) + len(tasks), None)
        else:
            self.calls.append(("start", len(tasks), None))

    def collect(self, request: CollectTrees, _progress: object = None, _finished: object = None) -> RolloutReport:
        self.calls.append(("collect", request.count, request.finish_before))
        done, self.in_flight = self.in_flight[: request.count], self.in_flight[request.count :]
        trees = [RolloutTree(task.id, np.arange(2)) for task in done]
        for tree in trees:
            tree.add(0, Role.MODEL, [1])
        stats = rollout_stats([], RolloutCounts(), [], failed=0, seconds=1.0)
        return RolloutReport(trees, [], stats, tuple(range(len(trees))))

    def stop_trees(self, _request: object) -> RolloutReport:
        raise AssertionError("no tree is left over")


class RecordingPool(RecordingHandle):
    """The same as a tree pool."""

    async def start(self, request: StartTrees) -> None:
        self.start_trees("", [tree.task for tree in request.trees])

    async def collect(self, request: CollectTrees) -> RolloutReport:  # type: ignore[override]
        return super().collect(request)

    async def pause(self) -> None: ...

    def resume(self, version: int) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", [rollout.STEPS, rollout.STEPS // 2])
def test_benchmark_starts_and_collects_trees_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, ahead: bool
) -> None:
    def score(trees: Sequence[RolloutTree], tasks: Sequence[Task], *, step: int) -> list[ScoredTree]:
        one = np.ones(1)
        return [ScoredTree(task, tree, one, one, one == 1) for task, tree in zip(tasks, trees, strict=True)]

    config = rollout._job(steps, ahead=ahead)
    tasks = [rollout._task(number) for number in range(rollout.TASKS * steps)]
    run: Any = RecordingHandle()
    scorer: Any = SimpleNamespace(score=score, begin=lambda *_tree, step: None)
    journal = StepJournal(tmp_path / "step_journal.msgpack", tmp_path, 1, 3600.0, pytest.fail)
    events = EventLog(tmp_path / "events.jsonl")
    collector = TreeCollector(config, run, scorer, EpochSelector(tasks, 1), journal, events)
    for step in range(steps):
        assert len(collector.collect(step)) == rollout.TASKS

    async def version() -> int:
        bench._version += 1
        return bench._version

    write_model(tmp_path / "model")
    pool = RecordingPool()
    bench = rollout.Bench("", TokenizerCodec(tmp_path / "model"), progress=False, steps=steps)
    bench._version = -1  # so that versions equal steps, as in a run
    monkeypatch.setattr(rollout, "new_pool", lambda *_: pool)
    monkeypatch.setattr(bench, "_new_version", version)
    nothing: Any = None
    asyncio.run(bench._in_trees(nothing, nothing, rollout.Run(), nothing, ahead=ahead))
    assert pool.calls == run.calls
