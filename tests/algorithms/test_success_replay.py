"""Replayed successes: the groups that get one, the number kept, and their survival in a checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.replay.base import StoredTrajectory, replace_trajectory, stored_trajectory
from arpo_megatron.algorithms.replay.success_replay import SuccessReplay
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.metrics import groups_solved, reward_metrics
from arpo_megatron.tree import Role, RolloutTree

PROMPT = [7, 8, 9]


def task(name: str) -> Task:
    return Task(name, (), "1", "math", "")


def scored(name: str, rewards: list[float], step: int = 0, first: int = 10) -> ScoredTree:
    """A fork after a first call for every reward but the first, which begins at the prompt."""
    tree = RolloutTree(name, PROMPT, step=step)
    tree.add(0, Role.MODEL, [first], logprobs=[-1.0], policy_version=step)
    if len(rewards) > 1:
        call = tree.add(0, Role.MODEL, [first + 1], logprobs=[-0.5], policy_version=step)
        result = tree.add(call, Role.TOOL, [first + 2])
        for number in range(len(rewards) - 1):
            tree.add(result, Role.MODEL, [first + 3 + number], logprobs=[-0.25], policy_version=step)
    values = np.array(rewards)
    return ScoredTree(task(name), tree, values, values, values > 0, terms={"f1": values})


def test_success_replay_puts_the_newest_success_into_a_failed_group() -> None:
    buffer = SuccessReplay()
    buffer.mix(scored("a", [0.0, 1.0, 0.0]), 0)
    buffer.mix(scored("b", [1.0, 1.0], first=50), 1)
    assert buffer.mix(scored("c", [0.0, 0.0]), 2).replayed == 0
    buffer.mix(scored("a", [1.0, 0.0, 0.0], step=2, first=30), 2)
    failed = scored("a", [0.0, 0.0, 0.0], step=5, first=70)
    mixed = buffer.mix(failed, 5)
    leaves = mixed.tree.leaves()
    assert mixed.replayed == 1 and mixed.rewards.tolist() == [0.0, 0.0, 1.0]
    assert [mixed.tree.path_tokens(leaf).tolist()[3:] for leaf in leaves] == [[70], [71, 72, 73], [30]]
    replay = mixed.tree.segments[leaves[-1]]
    assert replay.policy_version == 2 and replay.logprobs.tolist() == [-1.0]  # as it was sampled
    assert mixed.terms["f1"][:2].tolist() == [0.0, 0.0] and np.isnan(mixed.terms["f1"][2])
    assert buffer.metrics() == {"replay/trees": 1, "replay/stored": 4, "replay/age": 3.0, "replay/age_max": 3}
    assert buffer.metrics()["replay/trees"] == 0


def test_replayed_trajectories_do_not_count_in_reward_metrics() -> None:
    buffer = SuccessReplay()
    buffer.mix(scored("a", [1.0, 1.0]), 0)
    mixed = buffer.mix(scored("a", [0.0, 0.0, 0.0], step=5, first=70), 5)
    other = scored("b", [1.0, 0.0], step=5)
    assert mixed.rewards.sum() == 1.0
    assert reward_metrics([mixed, other], 0.5) == {"reward": 0.25, "success": 0.25, "format_ok": 0.25}
    lost = replace(other, dropped="stale")
    right = replace(other, accuracies=np.ones_like(other.accuracies), dropped="no_signal")
    assert groups_solved([mixed, other, lost, right], 0.5) == 1
    assert np.isnan(reward_metrics([buffer.mix(scored("a", [0.0], step=6, first=90), 6)], 0.5)["reward"])


def test_success_replay_leaves_groups_with_spread_or_success() -> None:
    buffer = SuccessReplay()
    buffer.mix(scored("a", [1.0, 1.0]), 0)
    for rewards in ([0.0, 1.0], [0.3, 0.3], [1.0, 1.0]):
        item = scored("a", rewards, 1)
        assert buffer.mix(item, 1) is item


def test_success_replay_drops_the_oldest_beyond_its_capacity() -> None:
    buffer = SuccessReplay(replay_keep=2, replay_capacity=3)
    for step in range(4):
        buffer.mix(scored("a", [1.0], step=step, first=10 * step), step)
    assert buffer.metrics()["replay/stored"] == 2
    for step in range(4, 6):
        buffer.mix(scored("b", [1.0], step=step), step)
    assert buffer.metrics()["replay/stored"] == 3
    assert buffer.mix(scored("a", [0.0], step=9, first=90), 9).tree.path_tokens(1).tolist()[3:] == [30]


def test_resumed_success_replay_replays_the_same() -> None:
    buffer, resumed = SuccessReplay(), SuccessReplay()
    for name in ("a", "b"):
        buffer.mix(scored(name, [0.0, 1.0, 0.5]), 3)
    taken = buffer.snapshot()
    buffer.mix(scored("a", [1.0]), 4)  # after the snapshot
    resumed.restore(taken())
    assert resumed.metrics()["replay/stored"] == 2
    for each in ("a", "b"):
        again = resumed.mix(scored(each, [0.0, 0.0]), 5)
        assert again.tree.path_tokens(again.tree.leaves()[-1]).tolist()[3:] == [11, 12, 13]
        assert again.tree.segments[again.tree.leaves()[-1]].logprobs.tolist() == [-0.25]


@given(st.integers(1, 5), st.data())
def test_replace_trajectory_changes_no_other_trajectory(count: int, data: st.DataObject) -> None:
    rewards = [float(number) for number in range(count)]
    item, donor = scored("a", rewards), scored("a", [9.0], first=99)
    row = data.draw(st.integers(0, count - 1))
    mixed = replace_trajectory(item, row, stored_trajectory(donor, 0))
    before = [item.tree.path_tokens(leaf).tolist() for leaf in item.tree.leaves()]
    after = [mixed.tree.path_tokens(leaf).tolist() for leaf in mixed.tree.leaves()]
    assert after == [*before[:row], *before[row + 1 :], [*PROMPT, 99]]
    assert mixed.rewards.tolist() == [*rewards[:row], *rewards[row + 1 :], 9.0]


def test_replace_trajectory_refuses_another_prompt() -> None:
    other = RolloutTree("a", [1])
    with pytest.raises(ValueError, match="another prompt"):
        replace_trajectory(scored("a", [0.0]), 0, StoredTrajectory(other.segments[0], (), 1.0, 1.0, True, 0))
