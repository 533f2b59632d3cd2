"""The guards of the loop refuse broken numbers."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.actor.statistics import PolicyStats, UpdateStats
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.minibatch import Minibatch
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.step_metrics import Logprobs, sampling_gap, update_metrics
from arpo_megatron.tasks.base import Task
from arpo_megatron.training_run import RunState, TrainingRun
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.tree_files import ScoredTree, read_trees, step_file

# The check looks at nothing of the run but its config.
RUN: Any = SimpleNamespace(config=JobConfig(name="test"))
STATS = UpdateStats.of(
    PolicyStats.of(ratio=torch.ones(3), log_ratio=torch.zeros(3), entropies=torch.ones(3)).sums,
    torch.ones(()),
    grad_norm=1.0,
    lr=1e-3,
    skipped=False,
)


def minibatch(*versions: int) -> tuple[Minibatch, list[Logprobs]]:
    """A tree whose MODEL segments of two tokens have these versions, sampled at -1 nat each, and its log-probs."""
    tree = RolloutTree("task", [1, 2])
    for version in versions:
        tree.add(0, Role.MODEL, [3, 4], logprobs=[-1.0, -1.0], policy_version=version)
    tree.add(0, Role.MODEL, [5])  # nobody knows what it was sampled at
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=100)
    return Minibatch(packs, [tree]), [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]


def place(of: tuple[Minibatch, list[Logprobs]], token: int, logprob: float) -> None:
    """The trainer's log-prob of a token of the tree, counted over its segments."""
    batch, logprobs = of
    logprobs[0][batch.packs[0].token_index == token] = logprob


def check(**changes: float) -> None:
    TrainingRun.check_on_policy(RUN, [dataclasses.replace(STATS, **changes)])  # type: ignore[arg-type]


def test_the_gap_is_the_largest_over_tokens_of_the_own_version() -> None:
    first, second = minibatch(3, 3), minibatch(3, 2)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.0
    place(second, 2, -1.5)
    place(second, 3, -0.75)
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    place(second, 4, -9.0)  # of an older version
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=3) == 0.5
    assert sampling_gap([first[0], second[0]], [first[1], second[1]], version=2) == 8.0
    assert sampling_gap([], [], version=3) == 0.0
    elsewhere = Minibatch(first[0].packs)  # a rank that is not the leader knows no trees
    assert sampling_gap([elsewhere], [first[1]], version=3) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trainer_logprob_that_is_not_finite_is_an_infinite_gap(bad: float) -> None:
    one = minibatch(3)
    place(one, 3, bad)
    assert sampling_gap([one[0]], [one[1]], version=3) == np.inf


def test_ratios_of_exactly_one_pass() -> None:
    check()
    TrainingRun.check_on_policy(RUN, [])  # type: ignore[arg-type]


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
    leader: Any = SimpleNamespace(decode=str)
    nothing = np.zeros(1)
    scored = [ScoredTree(Task("task", (), "1", "math", "?"), RolloutTree("task", [1]), nothing, nothing, nothing > 1)]
    run.directory.trees.write_text("a file where the directory should be")
    assert TrainingRun._store(run, scored * 3, leader) == 3
    assert TrainingRun._store(run, scored, leader) == 1
    assert run.state.totals == {"trees_not_stored": 4}
    told = [json.loads(line)["text"] for line in run.events.path.read_text().splitlines()]
    assert "the 3 trees of step 4 are not stored, training goes on" in told[0]
    run.directory.trees.unlink()
    assert TrainingRun._store(run, scored, leader) == 0
    assert len(read_trees(step_file(run.directory, 4))) == 1


def test_seconds_of_a_phase_do_not_include_those_of_phases_inside_it(tmp_path: Path, monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr("arpo_megatron.training_run.time.monotonic", lambda: clock[0])
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
