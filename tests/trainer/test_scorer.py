"""Scoring of trees: rewards and reward terms by leaf, in the order of the trees."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from arpo_megatron.config import RewardConfig
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.scorer import TreeScorer, mean_terms
from arpo_megatron.tree import Role, RolloutTree


def test_trees_are_scored_in_order_with_terms_by_leaf() -> None:
    trees = []
    for number in range(6):
        tree = RolloutTree(f"t{number}", [9])
        call = tree.add(0, Role.MODEL, [1, 2])
        tree.add(tree.add(call, Role.TOOL, [3]), Role.MODEL, [5])
        tree.add(0, Role.MODEL, [6])
        trees.append(tree)
    tasks = [Task(tree.task_id, (), "5" if number % 2 else "6", "math", "") for number, tree in enumerate(trees)]
    reward = make_reward(RewardConfig(terms={"tool_calls": 1.0, "length": 1.0}), max_response_tokens=8)
    answer = "<think>because</think><answer>\\boxed{5}</answer>"
    scorer = TreeScorer(reward, lambda ids: answer if ids[-1] == 5 else "broken")
    scored = scorer.score(trees, tasks, step=3)
    assert [item.accuracies.tolist() for item in scored] == [[0.0, 0.0], [1.0, 0.0]] * 3
    terms = scored[1].terms
    assert terms["tool_calls"].tolist() == [-1.0, 0.0]
    assert terms["length"].tolist() == [-0.5, -0.125]
    assert math.isnan(terms["verified"][1]), "a broken response has no answer"
    assert mean_terms([terms, {"tool_calls": np.array([-3.0])}]) == pytest.approx(
        {"verified": 1.0, "undecided": 0.0, "tool_bonus": 0.0, "tool_calls": -4 / 3, "length": -0.3125}
    )


@dataclass
class Counting:
    """Notes which groups it has scored, for which steps."""

    scored: list[tuple[str, int]] = field(default_factory=list)
    needs_judge: bool = False

    def score_group(self, group: ResponseGroup) -> list[Score]:
        self.scored.append((group.task.id, group.step))
        return [Score(1.0, 1.0, format_ok=True) for _ in group.responses]


def test_a_tree_is_scored_once_before_it_is_asked_for() -> None:
    reward = Counting()
    scorer, task = TreeScorer(reward, lambda _ids: "text"), Task("t0", (), "5", "math", "")
    tree = RolloutTree("t0", [9])
    tree.add(0, Role.MODEL, [1])
    for _ in range(2):
        scorer.begin(task, tree, step=3)
    assert scorer.score([tree], [task], step=3)[0].rewards.tolist() == [1.0]
    assert reward.scored == [("t0", 3)]


def test_a_tree_that_is_trained_in_a_later_step_is_scored_for_that_step() -> None:
    reward = Counting()
    scorer, task = TreeScorer(reward, lambda _ids: "text"), Task("t0", (), "5", "math", "")
    tree = RolloutTree("t0", [9])
    tree.add(0, Role.MODEL, [1])
    scorer.begin(task, tree, step=3)
    scorer.forget(4)
    scorer.score([tree], [task], step=4)
    assert ("t0", 4) in reward.scored
