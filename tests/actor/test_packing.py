"""Packs: every model token once, with its credit, in an order from which the tree can be read back."""

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.actor.packing import empty_pack, first_fit_decreasing, pack_trees, share_packs
from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.tree import Role, RolloutTree


def numbered_credit(tree: RolloutTree, start: int) -> TreeCredit:
    """A different number on every token, so that a misplaced one shows."""
    numbers = np.arange(start, start + tree.unique_tokens, dtype=np.float32)
    return TreeCredit(numbers, -numbers, numbers + 0.5)


def path_to(pack, position: int) -> list[int]:
    path = []
    while position >= 0:
        path.append(position)
        position = int(pack.parent_index[position])
    return path[::-1]


@settings(max_examples=60, deadline=None)
@given(
    forest=st.lists(cases.trees(), min_size=1, max_size=4),
    budget=st.integers(1, 60),
    multiple_of=st.sampled_from([1, 2, 8]),
)
def test_every_model_token_of_every_tree_is_trained_once_with_its_credit(forest, budget, multiple_of):
    credits = [numbered_credit(tree, 1000 * i) for i, tree in enumerate(forest)]
    packs = pack_trees(forest, credits, token_budget=budget, multiple_of=multiple_of)
    seen = []
    for pack in packs:
        for i, target in enumerate(pack.targets):
            seen.append(pack.positive[i])
            tree, token = int(pack.tree_index[i]), int(pack.positive[i]) - 1000 * int(pack.tree_index[i])
            starts = np.cumsum([len(segment) for segment in forest[tree].segments])
            segment = int(np.searchsorted(starts, token, side="right"))
            offset = token - (starts[segment] - len(forest[tree].segments[segment]))
            assert forest[tree].segments[segment].role is Role.MODEL
            assert pack.negative[i] == -pack.positive[i]
            assert pack.weight[i] == pack.positive[i] + 0.5
            assert pack.sampling_logprobs[i] == forest[tree].segments[segment].logprobs[offset]
            # Walking up the predictors spells the token's trajectory, and its depth is its position in it.
            path = path_to(pack, int(target))
            prefix = forest[tree].path_tokens(segment)[: len(path)]
            assert pack.token_ids[path].tolist() == prefix.tolist()
            assert pack.position_ids[path].tolist() == list(range(len(path)))
            assert (
                len(path) == len(forest[tree].path_tokens(segment)) - len(forest[tree].segments[segment]) + offset + 1
            )
    model_tokens = sum(len(s) for tree in forest for s in tree.segments if s.role is Role.MODEL)
    assert len(seen) == len(set(seen)) == model_tokens


@settings(max_examples=60, deadline=None)
@given(forest=st.lists(cases.trees(), min_size=1, max_size=4), multiple_of=st.sampled_from([1, 4]))
def test_a_token_attends_to_itself_and_its_ancestors_only(forest, multiple_of):
    credits = [numbered_credit(tree, 0) for tree in forest]
    (pack,) = pack_trees(forest, credits, token_budget=10**6, multiple_of=multiple_of)
    n = len(pack)
    assert n % multiple_of == 0 and n - sum(tree.unique_tokens for tree in forest) < multiple_of
    queries, keys = np.arange(n)[:, None], np.arange(n)[None]
    attends = (keys <= queries) & (queries < pack.subtree_end[None])
    for query in range(n):
        assert np.flatnonzero(attends[query]).tolist() == path_to(pack, query)
    assert pack.attention_pairs == attends.sum()


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 30), max_size=40), budget=st.integers(1, 40))
def test_packs_keep_to_the_budget_and_waste_little(sizes, budget):
    groups = first_fit_decreasing(sizes, budget)
    assert sorted(i for group in groups for i in group) == [i for i, size in enumerate(sizes) if size]
    loads = [sum(sizes[i] for i in group) for group in groups]
    assert all(load <= budget or len(group) == 1 for load, group in zip(loads, groups, strict=True))
    # First fit: two packs that would fit into one are never left apart.
    fitting = sorted(load for load in loads if load <= budget)
    assert len(fitting) < 2 or fitting[0] + fitting[1] > budget


@given(costs=st.lists(st.integers(1, 100), max_size=30), ranks=st.integers(1, 8))
def test_ranks_get_shares_that_differ_by_one_pack_at_most(costs, ranks):
    shares = share_packs(costs, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_a_micro_batch_without_loss_is_padding_only():
    pack = empty_pack(4)
    assert len(pack) == 4 and len(pack.targets) == 0
    assert pack.subtree_end.tolist() == [1, 2, 3, 4] and pack.parent_index.tolist() == [-1] * 4


def test_unknown_sampling_logprobs_are_nan():
    tree = RolloutTree("t", [1, 2])
    tree.add(0, Role.MODEL, [3, 4])
    (pack,) = pack_trees([tree], [numbered_credit(tree, 0)], token_budget=10)
    assert np.isnan(pack.sampling_logprobs).all()


def test_a_model_token_that_nothing_predicts_is_refused():
    tree = RolloutTree("t", [])
    tree.add(0, Role.MODEL, [3])
    with pytest.raises(ValueError, match="empty prompt"):
        pack_trees([tree], [numbered_credit(tree, 0)], token_budget=10)


def test_credits_that_do_not_fit_are_refused():
    tree = cases.grown(0)
    with pytest.raises(ValueError, match="1 trees but 0 credits"):
        pack_trees([tree], [], token_budget=10)
    with pytest.raises(ValueError, match="positive credits for"):
        pack_trees([tree], [numbered_credit(cases.grown(1), 0)], token_budget=10)
