"""Scoring of trees: rewards and reward terms by leaf, in the order of the trees."""

import math

import numpy as np
import pytest

from arpo_megatron.config import RewardConfig
from arpo_megatron.rewards import make_reward
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
