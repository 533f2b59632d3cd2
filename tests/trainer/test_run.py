"""The guards of the loop refuse broken numbers."""

import dataclasses
import errno
import json
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.actor.update_stats import PolicyStats, UpdateStats
from arpo_megatron.algorithms.base import TrainingProgress
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import EvalConfig, JobConfig, TrainConfig
from arpo_megatron.engine.admin import DiskPushError, FailedPush, WeightPushError
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.tree_store import TreeLog, read_trees, step_file
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.record import UnfinishedTree, unpack_trees
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.trainer.batch import Batch
from arpo_megatron.trainer.consistency import check_on_policy
from arpo_megatron.trainer.controller import Controller, probe_pack
from arpo_megatron.trainer.held_out import HeldOutResult, evaluation_due
from arpo_megatron.trainer.metrics import Logprobs, count_entropy, sampling_gap, update_metrics
from arpo_megatron.trainer.run import REPLAY_FILE, TREES_FILE, RunState, TrainingRun
from arpo_megatron.tree import Role, RolloutTree, ToolRecord

CONFIG = JobConfig(name="test")
STATS = UpdateStats.of(
    PolicyStats.of(ratio=torch.ones(3), log_ratio=torch.zeros(3), entropies=torch.ones(3)).sums,
    torch.ones(()),
    grad_norm=1.0,
    lr=1e-3,
    skipped=False,
)


def minibatch(*versions: int) -> tuple[Batch, list[Logprobs]]:
    """A tree whose MODEL segments of two tokens have these versions, sampled at -1 nat each, and its log-probs."""
    tree = RolloutTree("task", [1, 2])
    for version in versions:
        tree.add(0, Role.MODEL, [3, 4], logprobs=[-1.0, -1.0], policy_version=version)
    tree.add(0, Role.MODEL, [5])  # nobody knows what it was sampled at
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=100)
    return Batch(packs, [tree]), [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]


def place(of: tuple[Batch, list[Logprobs]], token: int, logprob: float) -> None:
    """The trainer's log-prob of a token of the tree, counted over its segments."""
    batch, logprobs = of
    logprobs[0][batch.packs[0].token_index == token] = logprob


def check(**changes: Any) -> None:
    check_on_policy([dataclasses.replace(STATS, **changes)], CONFIG)


def test_the_gap_is_the_largest_over_tokens_of_the_own_version() -> None:
    first, second = minibatch(3, 3), minibatch(3, 2)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.0
    place(second, 2, -1.5)
    place(second, 3, -0.75)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    place(second, 4, -9.0)  # of an older version
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=2) == 8.0


def test_where_nothing_is_compared_there_is_no_gap_to_tell() -> None:
    first = minibatch(3, 2)
    assert sampling_gap([first[0]], [first[1]], version=4) is None  # older versions sampled all
    assert sampling_gap([], [], version=3) is None
    elsewhere = Batch(first[0].packs)  # a rank that is not the controller knows no trees
    assert sampling_gap([elsewhere], [first[1]], version=3) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trainer_logprob_that_is_not_finite_is_an_infinite_gap(bad: float) -> None:
    one = minibatch(3)
    place(one, 3, bad)
    assert sampling_gap([one[0]], [one[1]], version=3) == np.inf


def test_a_push_is_probed_as_its_leader_says_and_one_that_failed_is_told_and_not_probed(monkeypatch: Any) -> None:
    """Without engines: that one fails, or differs, cannot be had at will."""
    answers: list[Any] = [WeightPushError("it died"), 0.1, 0.3]
    gathered, probed, pushed = [], [], []

    def push(buckets: Any, _version: int) -> Any:
        next(buckets)
        answer = answers.pop(0)
        if isinstance(answer, WeightPushError):
            raise answer
        return probe_pack([1, 2, 3]), lambda: [np.float32([-1, -1]), np.float32([-1, -1 - answer])]

    def logprobs(packs: Any, **_: Any) -> list[Logprobs]:
        probed.extend(packs)
        return [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]

    monkeypatch.setattr("arpo_megatron.trainer.run.hf_buckets", lambda *_, **__: (gathered.append(n) for n in range(3)))
    run: Any = SimpleNamespace(
        config=CONFIG,
        controller=SimpleNamespace(
            sync=SimpleNamespace(buffers=2), push=push, collector=SimpleNamespace(after_push=pushed.append)
        ),
        actor=SimpleNamespace(chunks=[], spec=None, logprobs=logprobs),
        state=RunState(),
    )
    assert TrainingRun._push_once(run, 7) == FailedPush("it died", disk=False)
    assert (gathered, probed, pushed) == ([0, 1, 2], [], [])  # every rank took part in gathering all
    assert TrainingRun._push_once(run, 7) is None
    assert ([len(pack.predictors) for pack in probed], pushed) == ([2], [7])
    assert run.state.logprob_gap_max == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match=r"push of version 8 the engine's log-probs differ .* by 3\.00e-01 nats"):
        TrainingRun._push_once(run, 8)
    assert pushed == [7]


@pytest.mark.parametrize(
    ("error", "pauses", "said"),
    [
        (WeightPushError("it died"), [1, 2], r"3 weight pushes in a row have failed \(it died\): go on with --resume"),
        (DiskPushError("full"), [1, 2, 4, 8, 16, 32, 60, 60, 60], r"10 weight .* \(full\): make room and go on with"),
    ],
)
def test_attempts_at_a_push_are_apart_and_more_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: Any, error: WeightPushError, pauses: list[int], said: str
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("arpo_megatron.trainer.run.time.sleep", slept.append)
    failed = FailedPush.of(error)
    answers: list[FailedPush | None] = [failed, failed, None]
    events = EventLog(tmp_path / "events.jsonl")
    run: Any = SimpleNamespace(stopping=lambda: False, _push_once=lambda _: answers.pop(0), events=events)
    TrainingRun.push_weights(run, 3)
    assert slept == [1, 2]
    slept.clear()
    run._push_once = lambda _: failed
    with pytest.raises(UserError, match=said):
        TrainingRun.push_weights(run, 3)
    assert slept == pauses
    assert "a weight push failed and is made again in 1 s: " in events.path.read_text()
    run.stopping = lambda: True  # a job that is asked to end does not wait for the disk
    TrainingRun.push_weights(run, 3)


def test_the_staleness_of_a_step_is_the_mean_over_its_sampled_tokens() -> None:
    def grown(*lengths: int) -> ScoredTree:
        """Of one path, whose parts of these lengths were sampled by the versions 0, 1, ..."""
        tree, parent = RolloutTree("task", [1]), 0
        for version, length in enumerate(lengths):
            parent = tree.add(parent, Role.MODEL, [5] * length, policy_version=version)
        return ScoredTree(Task("task", (), "1", "math", "?"), tree, np.ones(1), np.ones(1), np.ones(1, bool))

    controller: Any = SimpleNamespace(
        config=CONFIG,
        counters=lambda: defaultdict(float),
        reward=SimpleNamespace(judge=None),
        collector=SimpleNamespace(stats=[], store=None),
        selector=SimpleNamespace(metrics=dict),
    )
    found = Controller.step_metrics(controller, [grown(2, 6), grown(0, 4), grown(4, 4, 16)], 2)
    ages = [2] * 2 + [1] * 6 + [1] * 4 + [2] * 4 + [1] * 4 + [0] * 16
    assert found["staleness"] == pytest.approx(np.mean(ages))
    assert found["staleness_max"] == 2


def test_an_export_that_finds_no_room_says_from_where_a_resume_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("arpo_megatron.trainer.run.export_hf", full)
    directory = RunDirectory(tmp_path)
    run: Any = SimpleNamespace(
        config=CONFIG,
        directory=directory,
        actor=SimpleNamespace(chunks=[], spec=None),
        events=EventLog(directory.events),
        state=RunState(step=60),
        log_saves=lambda wait: None,
    )
    room = r"export could not be written \(No space left on device\): make room and go on with --resume, from "
    with pytest.raises(UserError, match=room + "the beginning"):
        TrainingRun.export(run)
    (directory.checkpoints / "step_50").mkdir(parents=True)
    with pytest.raises(UserError, match=room + "step_50"):
        TrainingRun.export(run)


def test_ratios_of_exactly_one_pass() -> None:
    check()
    check_on_policy([], CONFIG)


@pytest.mark.parametrize(
    "changes", [{"ratio_max": 1.0000001}, {"kl_old": 1e-12}, {"ratio_max": np.nan}, {"kl_old": np.nan}]
)
def test_any_other_ratio_before_an_update_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(RuntimeError, match="do not compute the same thing"):
        check(**changes)


def test_figures_of_experts_are_means_where_there_are_experts_and_absent_elsewhere() -> None:
    assert not {"expert_busiest", "expert_loss"} & update_metrics([STATS, STATS]).keys()
    rows = [dataclasses.replace(STATS, expert_busiest=busiest, expert_loss=1.5) for busiest in (1.0, 2.0)]
    found = update_metrics(rows)
    assert (found["expert_busiest"], found["expert_loss"]) == (1.5, 1.5)


def test_a_step_goes_on_where_its_trees_cannot_be_stored(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(
        directory=RunDirectory(tmp_path), events=EventLog(tmp_path / "events.jsonl"), state=RunState(step=4)
    )
    log = TreeLog(run.directory, lambda text: run.events.emit("note", text=text))
    controller: Any = SimpleNamespace(decode=str, collector=SimpleNamespace(left_out=[]), tree_log=log)
    nothing = np.zeros(1)
    scored = [ScoredTree(Task("task", (), "1", "math", "?"), RolloutTree("task", [1]), nothing, nothing, nothing > 1)]
    run.directory.trees.write_text("a file where the directory should be")
    assert TrainingRun._store(run, scored * 3, controller) == 3
    run.state.step = 5
    assert TrainingRun._store(run, scored, controller) == 4
    assert run.state.totals == {"trees_not_stored": 4}
    told = [json.loads(line)["text"] for line in run.events.path.read_text().splitlines()]
    assert "4 trees of steps 4, 5 wait for the disk, training goes on: " in told[1]
    run.directory.trees.unlink()
    run.state.step = 6
    assert TrainingRun._store(run, scored, controller) == 0
    assert run.state.totals == {"trees_not_stored": 0}
    assert [len(read_trees(step_file(run.directory, step))) for step in (4, 5, 6)] == [3, 1, 1]


def test_seconds_of_a_phase_do_not_include_those_of_phases_inside_it(tmp_path: Path, monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr("arpo_megatron.trainer.run.time.monotonic", lambda: clock[0])
    run: Any = SimpleNamespace(events=EventLog(tmp_path / "events.jsonl"), state=RunState(), phases={}, entered=[])
    with TrainingRun.phase(run, "update"):
        clock[0] += 3.0
        for _ in range(2):
            with TrainingRun.phase(run, "ratios"):
                clock[0] += 5.0
        clock[0] += 1.0
    assert run.phases == {"update": 4.0, "ratios": 10.0}
    shown = [json.loads(line)["name"] for line in run.events.path.read_text().splitlines()]
    assert shown == ["update", "ratios", "update", "ratios", "update"]


def test_a_loss_is_told_the_entropy_of_the_steps_before_and_a_skipped_step_does_not_count() -> None:
    run: Any = SimpleNamespace(state=RunState(), config=JobConfig(name="test"))
    steps = run.config.train.steps
    assert TrainingRun._course(run) == TrainingProgress(0, steps, None)
    first = [dataclasses.replace(STATS, entropy_mean=value) for value in (1.0, 2.0)]
    count_entropy(run.state.totals, first)
    count_entropy(run.state.totals, [dataclasses.replace(STATS, entropy_mean=float("nan"), skipped=True)])
    count_entropy(run.state.totals, [dataclasses.replace(STATS, entropy_mean=0.5)])
    run.state.step = 3
    assert TrainingRun._course(run) == TrainingProgress(3, steps, 1.0)


def test_a_checkpoint_within_a_step_has_the_sampler_of_the_same_moment_as_the_trees() -> None:
    saved = {}

    def save(step: int, _actor: object, state: dict[str, Any], files: dict[str, Any]) -> None:
        saved.update(step=step, selector=state["selector"], trees=files[TREES_FILE](), experience=files[REPLAY_FILE]())

    selector = EpochSelector([Task(f"t{n}", (), "1", "math", "?") for n in range(9)], seed=1)
    tree = UnfinishedTree("t1", 2, 2, (b"sampled",))
    collector = SimpleNamespace(unfinished=lambda: [tree], snapshot=lambda: lambda: b"stored")
    run: Any = SimpleNamespace(
        controller=SimpleNamespace(collector=collector),
        selector=selector,
        state=RunState(step=2, selector=selector.state_dict()),
        checkpoints=SimpleNamespace(save=save),
        actor=None,
    )
    selector.next_batch(4)  # by the step that is under way
    TrainingRun._save(run)
    assert (saved["step"], saved["selector"]["position"]) == (2, 4)
    assert (unpack_trees(saved["trees"]), saved["experience"]) == ([tree], b"stored")


@pytest.mark.parametrize(
    ("evaluation", "due"),
    [
        (EvalConfig(), {0: "before", 6: "after"}),
        (EvalConfig(every=2), {0: "before", 2: "step_2", 4: "step_4", 6: "after"}),
        (EvalConfig(every=4, before=False, after=False), {4: "step_4"}),
    ],
)
def test_evaluations_are_due_before_after_and_every_so_many_steps(evaluation: EvalConfig, due: dict[int, str]) -> None:
    config = dataclasses.replace(JobConfig(name="test"), train=TrainConfig(steps=6), evaluation=evaluation)
    assert {step: when for step in range(7) if (when := evaluation_due(config, step))} == due


def test_an_evaluation_is_recorded_once_with_what_each_task_earned(tmp_path: Path) -> None:
    tasks = [Task(f"held-out-{number}", (), "1", "math", "?") for number in range(4)]
    asked: list[int] = []

    def evaluate(tasks: list[Task], step: int) -> HeldOutResult:
        asked.append(step)
        trees = [RolloutTree(task.id, [1]) for task in tasks[1:]]  # the first one could not be finished
        call = trees[0].add(0, Role.MODEL, [2], logprobs=[-1.0])
        trees[0].add(call, Role.TOOL, [3], tool=ToolRecord("search", {}, "timeout", seconds=1.0, cached=False))
        found = [
            ScoredTree(task, tree, np.array([reward]), np.array([reward]), np.array([True]))
            for task, tree, reward in zip(tasks[1:], trees, (1.0, 0.5, 0.0), strict=True)
        ]
        return HeldOutResult.of(tasks, found, threshold=0.5)

    evaluated = EvalConfig(tasks=4, every=2)
    config = dataclasses.replace(JobConfig(name="test"), train=TrainConfig(steps=6), evaluation=evaluated)
    run: Any = SimpleNamespace(
        config=config,
        directory=RunDirectory(tmp_path),
        held_out=tasks,
        state=RunState(step=2, totals={"tool_calls_executed": 12.0}),
        controller=SimpleNamespace(evaluate=evaluate),
        events=EventLog(tmp_path / "events.jsonl"),
        _with_weights=lambda work: work(),
    )
    TrainingRun.evaluate(run)
    TrainingRun.evaluate(run)  # as a resumed run does
    assert asked == [2]
    assert run.state.success == {"step_2": 0.25}
    found = json.loads((tmp_path / "held_out" / "step_000002.json").read_text())
    assert found["solved"] == {"held-out-0": False, "held-out-1": True, "held-out-2": False, "held-out-3": False}
    assert found["rewards"] == {"held-out-1": 1.0, "held-out-2": 0.5, "held-out-3": 0.0}
    assert found["tool_calls"] == {"timeout": 1}
    assert (found["step"], found["totals"]) == (2, {"tool_calls_executed": 12.0})
