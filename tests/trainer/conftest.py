"""A tree collector with doubles of its surroundings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.config import AlgorithmConfig, JobConfig, RolloutConfig, TrainConfig
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.trainer.collector import TreeCollector
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import RolloutTree
from tests.trainer.doubles import Rollouts, Selector, Start


@pytest.fixture
def collector(tmp_path: Path) -> Start:
    def make(
        signal: Callable[[str], bool] = lambda _id: True, selector: TaskSelector | None = None, **rollout: Any
    ) -> tuple[TreeCollector, Rollouts]:
        def score(trees: Sequence[RolloutTree], tasks: Sequence[Task], *, step: int) -> list[ScoredTree]:
            correct = [np.array([0.0, 1.0 if signal(task.id) else 0.0]) for task in tasks]
            shaped = [np.maximum(given, [0.0, 0.1]) for given in correct]  # no reason to keep a tree
            whole = zip(tasks, trees, shaped, correct, strict=True)
            return [ScoredTree(task, tree, reward, given, given == 1) for task, tree, reward, given in whole]

        config = JobConfig(
            "test",
            train=TrainConfig(steps=4, tasks_per_step=4),
            rollout=RolloutConfig(**rollout),
            algorithm=AlgorithmConfig(drop_groups_without_signal=True, sampling_correction="tis"),
        )
        rollouts = Rollouts()
        events = EventLog(tmp_path / "events.jsonl")
        journal = StepJournal(tmp_path / "step_journal.msgpack", tmp_path, 1, 3600.0, pytest.fail)
        scorer: Any = SimpleNamespace(score=score, begin=lambda *_tree, step: None, forget=lambda _step: None)
        double: Any = rollouts
        return TreeCollector(config, double, scorer, selector or Selector(), journal, events), rollouts

    return make
