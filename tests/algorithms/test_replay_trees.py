"""Stored trees added to those of a step: their choice, their advantages, their number, and after a resume."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.replay.base import AddsTrees
from arpo_megatron.algorithms.replay.rollout_replay import RolloutReplay
from arpo_megatron.algorithms.replay.self_imitation import SelfImitation
from arpo_megatron.algorithms.replay.success_replay import SuccessReplay
from arpo_megatron.algorithms.replay.whole_trees import decode_trees, encode_trees, storable_tree
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.monitor.tree_store import read_trees, write_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.trainer.batch import build_batches
from arpo_megatron.trainer.collector import interleave
from tests.actor import cases
from tests.algorithms.test_success_replay import PROMPT, scored


def paths(item: ScoredTree) -> list[list[int]]:
    return [item.tree.path_tokens(leaf).tolist()[len(PROMPT) :] for leaf in item.tree.leaves()]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5), st.data())
def test_storable_trees_survive_packing(rewards: list[float], data) -> None:
    item = scored("a", rewards, step=3)
    rows = sorted(data.draw(st.sets(st.integers(0, len(rewards) - 1), min_size=1)))
    for kept in (storable_tree(item, rows), *decode_trees(encode_trees([storable_tree(item, rows)]))):
        assert paths(kept) == [paths(item)[row] for row in rows] and kept.task == item.task
        assert kept.rewards.tolist() == [rewards[row] for row in rows] and kept.tree.step == 3
        assert kept.replayed == len(rows) and not kept.sampled
        for leaf, row in zip(kept.tree.leaves(), rows, strict=True):
            own, other = kept.tree.segments[leaf], item.tree.segments[item.tree.leaves()[row]]
            assert own.logprobs.tolist() == other.logprobs.tolist() and own.policy_version == 3


def test_self_imitation_replays_a_full_buffer_above_the_median_mean() -> None:
    buffer = SelfImitation(imitation_capacity=3, imitation_weight=2.0, imitation_warmup=8)
    groups = {0: [0.0, 1.0], 1: [0.0, 0.2, 0.1], 2: [1.0, 1.0], 3: [0.0, 3.0, 0.0]}
    kept: list[tuple[int, float]] = []  # by the formula, on plain lists
    for step, rewards in groups.items():
        item = scored(f"t{step}", rewards, step=step)
        assert buffer.mix(item, step) is item
        kept += [(step, r) for r in rewards if r > np.mean(rewards)]
        found = buffer.extra_trees(1, step)
        assert bool(found) is (len(kept) == 3)
    usual = np.median([np.mean(rewards) for rewards in groups.values()])  # of 0.5, 0.1, 1, 1
    gamma = 2.0 * (1 - math.cos(math.pi * 3 / 8)) / 2
    expected = [(step, gamma * (r - usual)) for step, r in kept if r > usual]
    assert [item.tree.step for item in found] == [step for step, _ in expected]
    assert [item.advantages.tolist() for item in found] == [pytest.approx([value]) for _, value in expected]
    assert buffer.metrics() == {"replay/trees": 2, "replay/stored": 0, "replay/age": 1.5, "replay/age_max": 3}
    assert buffer.extra_trees(1, 3) == []


def test_self_imitation_is_bounded_in_age_and_size_and_warms_up() -> None:
    buffer = SelfImitation(imitation_capacity=2, imitation_age=2, imitation_baselines=1)
    buffer.mix(scored("a", [0.0, 1.0], step=0), 0)
    buffer.mix(scored("a", [0.0, 1.0, 2.0], step=0), 0)
    assert buffer.metrics()["replay/stored"] == 2
    assert buffer.extra_trees(2, 0) == []  # gamma is 0 in the first step
    for step in (1, 4):
        buffer.mix(scored("a", [0.0, 1.0], step=step), step)
        assert buffer.extra_trees(1, step) == []  # the first is too old when the second comes
    buffer.mix(scored("a", [0.0, 5.0], step=5), 5)
    (found,) = buffer.extra_trees(1, 5)  # the usual mean is that of the last group alone
    assert found.rewards.tolist() == [5.0] and found.advantages is not None and found.advantages[0] > 0


def test_rollout_replay_adds_its_share_of_earlier_trees() -> None:
    buffer = RolloutReplay(rollout_share=0.4, rollout_capacity=4)
    for step in range(3):
        for number in range(3):
            buffer.mix(scored(f"{step}-{number}", [0.0, 1.0, 0.0], step=step), step)
        buffer.mix(scored(f"{step}-flat", [1.0, 1.0], step=step), step)
        found = buffer.extra_trees(3, step)
        assert len(found) == (0 if step == 0 else 2)  # 2 of 5
        assert all(item.tree.step < step and item.advantages is None and not item.sampled for item in found)
        assert len({item.task.id for item in found}) == len(found)
        assert not any("flat" in item.task.id for item in found)
    assert buffer.metrics()["replay/stored"] == 12 and buffer.metrics()["replay/trees"] == 0


def test_rollout_replay_respects_its_age_window() -> None:
    buffer = RolloutReplay(rollout_age=2)
    for step in range(4):
        buffer.mix(scored(f"t{step}", [0.0, 1.0], step=step), step)
        assert {item.tree.step for item in buffer.extra_trees(9, step)} == set(range(max(0, step - 2), step))


@pytest.mark.parametrize("make", [RolloutReplay, lambda: SelfImitation(imitation_capacity=4)])
def test_resumed_buffer_adds_the_same_trees(make) -> None:
    buffer, resumed = make(), make()
    for step in range(3):
        buffer.mix(scored(f"t{step}", [0.0, 1.0], step=step), step)
        buffer.extra_trees(1, step)
    taken = buffer.snapshot()
    buffer.mix(scored("later", [0.0, 1.0], step=3), 3)
    resumed.restore(taken())
    resumed.mix(scored("later", [0.0, 1.0], step=3), 3)
    one, other = buffer.extra_trees(2, 3), resumed.extra_trees(2, 3)
    assert one and [item.tree.to_dict() for item in one] == [item.tree.to_dict() for item in other]
    assert [item.advantages is None or item.advantages.tolist() for item in one] == [
        item.advantages is None or item.advantages.tolist() for item in other
    ]
    assert buffer.metrics() == resumed.metrics()
    assert isinstance(buffer, AddsTrees) and not isinstance(SuccessReplay(), AddsTrees)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4))
def test_minibatches_get_even_shares_of_stored_trees(own: int, added: int, parts: int) -> None:
    trees = [scored(f"own{number}", [0.0]) for number in range(own)]
    stored_ones = [scored(f"added{number}", [0.0]) for number in range(added)]
    mixed = [item.task.id for item in interleave(trees, stored_ones)]
    assert [name for name in mixed if name.startswith("own")] == [item.task.id for item in trees]
    assert [name for name in mixed if name.startswith("added")] == [item.task.id for item in stored_ones]
    for count in range(len(mixed) + 1):
        assert abs(sum(name.startswith("added") for name in mixed[:count]) - count * added / len(mixed)) <= 1


def test_advantages_of_the_buffer_replace_those_of_the_estimator() -> None:
    """RAPO's estimator looks at all groups; those with given advantages must not change its result."""
    own, flat = scored("own", [0.0, 1.0, 0.5]), scored("flat", [1.0, 1.0])
    given = replace(storable_tree(scored("given", [0.0, 3.0]), [1]), advantages=np.array([0.25]))
    again = storable_tree(scored("again", [0.0, 2.0]))
    found = {}
    for name in ("rapo", "group"):
        config = cases.job(algorithm=AlgorithmConfig(advantage=name, minibatches=2))
        halves = build_batches([own, given, again, flat], config, cases.QWEN3)
        assert [tree.task_id for half in halves for tree in half.trees] == ["own", "given", "again", "flat"]
        found[name] = [values for half in halves for values in half.advantages]
        assert found[name][1].tolist() == [0.25]
    for number, item in ((0, own), (2, again), (3, flat)):
        np.testing.assert_allclose(found["group"][number], group_advantages(item.rewards))
    biased = [(r - np.mean(own.rewards)) / (np.std(own.rewards) + 1e-6) for r in own.rewards]
    np.testing.assert_allclose(found["rapo"][0], [3 / 2 * value for value in biased])  # of three groups two have spread


def test_tree_files_mark_replayed_trees(tmp_path: Path) -> None:
    items = [scored("a", [0.0, 1.0]), storable_tree(scored("b", [0.0, 1.0]))]
    write_trees(tmp_path / "step_000000.parquet", 0, items, lambda _ids: "")
    assert [item.replayed for item in read_trees(tmp_path / "step_000000.parquet")] == [0, 2]
