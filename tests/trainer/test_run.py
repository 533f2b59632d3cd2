"""A training run on one rank: phases, evaluations, checkpoints and the export, without engines."""

import dataclasses
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.algorithms.base import TrainingProgress
from arpo_megatron.config import AlgorithmConfig, EvalConfig, JobConfig, TrainConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.tree_store import TreeLog, stored_steps
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.record import UntrainedTree, decode_records
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.trainer import controller as controller_module
from arpo_megatron.trainer.collector import StepInProgress
from arpo_megatron.trainer.controller import REPLAY_FILE, TREES_FILE, Controller, ControllerState
from arpo_megatron.trainer.held_out import HeldOutResult, evaluation_due
from arpo_megatron.trainer.run import RunState, TrainingRun
from arpo_megatron.tree import BranchRecord, Role, RolloutTree, ToolRecord

CONFIG = JobConfig(name="test", train=TrainConfig(steps=6))


def new_run(path: Path, config: JobConfig = CONFIG, **changes: Any) -> TrainingRun:
    events = EventLog(path / "events.jsonl")
    session: Any = SimpleNamespace(
        config=config,
        directory=RunDirectory(path),
        actor=SimpleNamespace(chunks=[], spec=None),
        events=events,
        note=lambda text: events.emit("note", text=text),
        start=path,
        log_saves=lambda wait: None,
    )
    return TrainingRun(session, **{"sync": None, "controller": None, "held_out": (), **changes})


def test_seconds_of_a_phase_leave_out_those_of_inner_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("arpo_megatron.trainer.run.time.monotonic", lambda: clock[0])
    run = new_run(tmp_path)
    with run.phase("update"):
        clock[0] += 3.0
        for _ in range(2):
            with run.phase("ratios"):
                clock[0] += 5.0
        clock[0] += 1.0
    assert run.seconds == {"update": 4.0, "ratios": 10.0}
    shown = [json.loads(line)["name"] for line in run.session.events.path.read_text().splitlines()]
    assert shown == ["update", "ratios", "update", "ratios", "update"]


def test_progress_has_the_mean_entropy_of_earlier_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.progress() == TrainingProgress(0, 6, None)
    run.state = RunState(step=3, totals={"entropy": 2.0, "entropy_steps": 2})
    assert run.progress() == TrainingProgress(3, 6, 1.0)


def test_failed_export_names_the_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("arpo_megatron.trainer.run.export_hf", full)
    run = new_run(tmp_path)
    room = r"export could not be written \(No space left on device\): free disk space, then .* --resume \(from "
    with pytest.raises(UserError, match=room + "the beginning"):
        run.export()
    (run.session.directory.checkpoints / "step_50").mkdir(parents=True)
    with pytest.raises(UserError, match=room + "step_50"):
        run.export()


def test_checkpoint_within_a_step_has_selector_and_trees_of_one_moment(tmp_path: Path) -> None:
    selector = EpochSelector([Task(f"t{n}", (), "1", "math", "?") for n in range(9)], seed=1)
    selector.next_batch(4)  # by the step in progress
    tree = UntrainedTree("t1", 2, 2, (b"sampled",))
    collector = SimpleNamespace(selector=selector, unfinished=lambda: [tree], replay_snapshot=lambda: lambda: b"stored")
    controller: Any = SimpleNamespace(snapshot=lambda: Controller.snapshot(SimpleNamespace(collector=collector)))  # type: ignore[arg-type]
    run = new_run(tmp_path, controller=controller, state=RunState(step=2))
    saved: list[Any] = []
    run.session.save = lambda *args: saved.append(args)  # type: ignore[method-assign, misc]
    run.save()
    ((step, state, files),) = saved
    assert (step, state["selector"]["position"]) == (2, 4)
    assert (decode_records(files[TREES_FILE]()), files[REPLAY_FILE]()) == ([tree], b"stored")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content())
    loaded = ControllerState.load(tmp_path, state["selector"])
    assert (loaded.trees, loaded.replay and loaded.replay()) == ([tree], b"stored")


def test_step_continues_if_its_trees_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "rollout_metrics", lambda *_: {})
    directory, notes = RunDirectory(tmp_path), list[str]()
    steps = iter(StepInProgress(step) for step in (3, 4, 5))
    controller: Any = SimpleNamespace(
        session=SimpleNamespace(config=CONFIG),
        decode=str,
        reward=SimpleNamespace(judge=None),
        collector=SimpleNamespace(end_step=lambda: next(steps), selector=SimpleNamespace(metrics=dict), replay=None),
        tree_log=TreeLog(directory, notes.append),
    )
    nothing, totals = np.zeros(1), dict[str, float]()
    scored = [ScoredTree(Task("task", (), "1", "math", "?"), RolloutTree("task", [1]), nothing, nothing, nothing > 1)]
    directory.trees.write_text("a file where the directory should be")
    for trees, missing in ((scored * 3, 3), (scored, 4)):
        assert Controller.finish_step(controller, trees, [], totals)["trees_not_stored"] == missing
        assert totals["trees_not_stored"] == missing
    assert len(notes) == 1
    assert "the trees of step 4 are not stored" in notes[0]
    directory.trees.unlink()
    assert Controller.finish_step(controller, scored, [], totals)["trees_not_stored"] == 4
    assert stored_steps(directory) == [6]


@pytest.mark.parametrize(("branching", "stored"), [("random", [0.5, None]), ("arpo", [])])
def test_random_arm_stores_the_chance_that_arpo_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branching: str, stored: list[float | None]
) -> None:
    monkeypatch.setattr(controller_module, "rollout_metrics", lambda *_: {})
    config = replace(CONFIG, algorithm=AlgorithmConfig(branching=branching, entropy_weight=0.5, branch_probability=0.3))
    steps, chances = iter(StepInProgress(step) for step in (0, 1)), list[float | None]()
    collector = SimpleNamespace(
        end_step=lambda: next(steps), selector=SimpleNamespace(metrics=dict), replay=None, arpo_chances=chances
    )
    controller: Any = SimpleNamespace(
        session=SimpleNamespace(config=config),
        decode=str,
        reward=SimpleNamespace(judge=None),
        collector=collector,
        tree_log=TreeLog(RunDirectory(tmp_path), pytest.fail),
    )
    tree = RolloutTree("task", [1])
    for rise in (0.2, 0.6):
        record = BranchRecord(dH=rise, probability=0.9, draw=0.1, why="draw")
        tree.add(tree.add(0, Role.TOOL, [2]), Role.MODEL, [3], branch=record)
    found = []
    for own in (tree, RolloutTree("task", [1])):
        values = np.ones(len(own.leaves()))
        scored = ScoredTree(Task("task", (), "1", "math", "?"), own, values, values, values > 0)
        found.append(Controller.finish_step(controller, [scored], [], {}).get("arpo_fork_chance"))
    assert chances == [chance if chance is None else pytest.approx(chance) for chance in stored]
    assert found == (chances or [None, None])


@pytest.mark.parametrize(
    ("evaluation", "due"),
    [
        (EvalConfig(), {0: "before", 6: "after"}),
        (EvalConfig(every=2), {0: "before", 2: "step_2", 4: "step_4", 6: "after"}),
        (EvalConfig(every=4, before=False, after=False), {4: "step_4"}),
    ],
)
def test_evaluations_are_due_before_after_and_every_n_steps(evaluation: EvalConfig, due: dict[int, str]) -> None:
    config = dataclasses.replace(CONFIG, evaluation=evaluation)
    assert {step: when for step in range(7) if (when := evaluation_due(config, step))} == due


def test_evaluation_is_recorded_once_with_the_reward_of_each_task(tmp_path: Path) -> None:
    tasks = [Task(f"held-out-{number}", (), "1", "math", "?") for number in range(4)]
    evaluated: list[int] = []

    def evaluate(tasks: list[Task], step: int) -> HeldOutResult:
        evaluated.append(step)
        trees = [RolloutTree(task.id, [1]) for task in tasks[1:]]  # the first one could not be finished
        call = trees[0].add(0, Role.MODEL, [2], logprobs=[-1.0])
        trees[0].add(call, Role.TOOL, [3], tool=ToolRecord("search", {}, "timeout", seconds=1.0, cached=False))
        scored = [
            ScoredTree(task, tree, np.array([reward]), np.array([reward]), np.array([True]))
            for task, tree, reward in zip(tasks[1:], trees, (1.0, 0.5, 0.0), strict=True)
        ]
        return HeldOutResult.from_trees(tasks, scored, threshold=0.5)

    run = new_run(
        tmp_path,
        dataclasses.replace(CONFIG, evaluation=EvalConfig(tasks=4, every=2)),
        controller=SimpleNamespace(evaluate=evaluate),
        held_out=tasks,
        state=RunState(step=2, totals={"tool_calls_executed": 12.0}),
    )
    run.evaluate()
    run.evaluate()  # as a resumed run does
    assert evaluated == [2]
    assert run.state.success == {"step_2": 0.25}
    found = json.loads((tmp_path / "held_out" / "step_000002.json").read_text())
    assert found["solved"] == {"held-out-0": False, "held-out-1": True, "held-out-2": False, "held-out-3": False}
    assert found["rewards"] == {"held-out-1": 1.0, "held-out-2": 0.5, "held-out-3": 0.0}
    assert found["tool_calls"] == {"timeout": 1}
    assert (found["step"], found["totals"]) == (2, {"tool_calls_executed": 12.0})
