"""Packs train every MODEL token once, with its credit, in depth-first order."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.actor import microbatch
from arpo_megatron.actor.microbatch import ContextShard, MicroBatches, padding_of
from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.packing.balance import PACK_COST_TOKENS, balanced_groups, divide_work, first_fit_decreasing
from arpo_megatron.packing.packs import SHARED_PREFIX_TOKENS, pack_trees, rank_groups, report_packs
from arpo_megatron.tree import Role, RolloutTree
from tests.actor import cases


def numbered_credit(tree: RolloutTree, start: int) -> TreeCredit:
    """A different number on every token, so that a misplaced one shows."""
    numbers = np.arange(start, start + tree.unique_tokens, dtype=np.float32)
    return TreeCredit(numbers, -numbers, numbers + 0.5)


def path_to(pack, position: int) -> list[int]:
    """Return the tokens that a token attends to, itself included, by the mask's definition."""
    return [key for key in range(position + 1) if position < pack.subtree_end[key]]


def assert_packed(packs, forest):
    """Every model token of every tree is predicted once, with its credit, from its own trajectory's tokens."""
    seen = set()
    for index, pack in enumerate(packs):
        for i, predictor in enumerate(pack.predictors):
            assert predictor >= pack.inherited + pack.repeated  # predicted where it is computed first
            tree, token = int(pack.tree_index[i]), int(pack.token_index[i])
            seen.add((tree, token))
            assert pack.positive[i] == 1000 * tree + token == -pack.negative[i] == pack.weight[i] - 0.5
            starts = np.cumsum([len(segment) for segment in forest[tree].segments])
            segment = int(np.searchsorted(starts, token, side="right"))
            offset = token - (starts[segment] - len(forest[tree].segments[segment]))
            assert forest[tree].segments[segment].role is Role.MODEL
            assert pack.sampling_logprobs[i] == forest[tree].segments[segment].logprobs[offset]
            # The tokens that the predictor attends to spell the trajectory before the target.
            trajectory = forest[tree].path_tokens(segment)
            length = len(trajectory) - len(forest[tree].segments[segment]) + offset
            path = path_to(pack, int(predictor))
            assert pack.token_ids[path].tolist() == trajectory[:length].tolist()
            assert pack.target_ids[i] == trajectory[length]
            assert pack.position_ids[path].tolist() == list(range(length))
        for place, (source, there) in enumerate(zip(pack.inherited_pack, pack.inherited_index, strict=True)):
            assert source < index and packs[source].data_rank == pack.data_rank
            assert there >= packs[source].inherited and packs[source].token_ids[there] == pack.token_ids[place]
    model_tokens = sum(len(s) for tree in forest for s in tree.segments if s.role is Role.MODEL)
    assert len(seen) == sum(len(pack.predictors) for pack in packs) == model_tokens


@settings(max_examples=100)
@given(
    forest=st.lists(cases.trees(), min_size=1, max_size=4),
    budget=st.integers(1, 60),
    ranks=st.integers(1, 3),
    inherit=st.booleans(),
    group=st.none() | st.integers(1, 4),
)
def test_model_tokens_of_all_trees_are_trained_once_with_their_credit(forest, budget, ranks, inherit, group):
    credits = [numbered_credit(tree, 1000 * i) for i, tree in enumerate(forest)]
    packs, again = (
        pack_trees(
            forest,
            credits,
            token_budget=budget,
            ranks=ranks,
            inherit=inherit,
            group_tokens=group and group * budget,
            lockstep=ranks > 1,
        )
        for _ in range(2)
    )
    assert_packed(packs, forest)
    assert pickle.dumps(again) == pickle.dumps(packs)  # a plan follows from its inputs alone
    made = report_packs(packs, forest, ranks=ranks)
    longest = max(len(tree.path_tokens(leaf)) for tree in forest for leaf in tree.leaves())
    leaves = sum(len(tree.leaves()) for tree in forest)
    assert made.computed <= made.flat + PACK_COST_TOKENS * leaves  # never far from flattening
    if inherit:
        assert all(len(pack) <= budget for pack in packs)
        assert made.repeated == 0 or group is not None
    else:
        assert made.inherited == 0
        assert all(len(pack) <= max(budget, longest) for pack in packs)
    for rank in range(ranks):
        for indices in rank_groups(packs, rank):
            assert indices == list(range(indices[0], indices[-1] + 1))
            assert {int(source) for index in indices for source in packs[index].inherited_pack} <= set(indices)
            if group is not None and len(indices) > 1:
                assert sum(len(packs[index]) for index in indices) <= max(group * budget, longest)
    assert made.computed == made.unique + made.repeated - made.saved_by_shared_prompt
    assert made.saved_by_shared_prompt >= 0


@settings(max_examples=40)
@given(
    rests=st.lists(st.lists(st.integers(0, 31), max_size=3), min_size=2, max_size=4),
    system=st.lists(st.integers(0, 31), min_size=1, max_size=SHARED_PREFIX_TOKENS + 9),
    seed=st.integers(0, 99),
)
def test_system_prompt_is_computed_once_per_pack(rests, system, seed):
    rng = np.random.default_rng(seed)
    forest = []
    for i, rest in enumerate(rests):
        tree = RolloutTree(str(i), [*system, *rest])
        for _ in range(3):
            cases.add(tree, 0, Role.MODEL, 4, rng)
        forest.append(tree)
    packs = pack_trees(forest, [numbered_credit(t, 1000 * i) for i, t in enumerate(forest)], token_budget=10**6)
    assert_packed(packs, forest)
    assert len(packs) == 1
    assert report_packs(packs, forest).saved_by_shared_prompt >= len(system) * (len(forest) - 1)
    assert packs[0].multiplicity[0] == 3 * len(forest)


def test_odd_prompt_does_not_prevent_sharing():
    rng = np.random.default_rng(0)
    forest = []
    for number, prompt in enumerate([[1] * 50] * 4 + [[2] * 50] * 3 + [[3] * 20, [4] * 20]):
        tree = RolloutTree(str(number), [*prompt, number])
        cases.add(tree, 0, Role.MODEL, 4, rng)
        forest.append(tree)
    packs = pack_trees(forest, [numbered_credit(t, 1000 * i) for i, t in enumerate(forest)], token_budget=10**6)
    assert_packed(packs, forest)
    assert report_packs(packs, forest).saved_by_shared_prompt == 3 * 50 + 2 * 50
    assert len(packs) == 3


@settings(max_examples=30)
@given(forest=st.lists(cases.trees(), min_size=3, max_size=9), budget=st.integers(20, 60))
def test_packs_in_step_are_paired_by_cost(forest, budget):
    credits = [numbered_credit(tree, 1000 * i) for i, tree in enumerate(forest)]
    apart, meeting = (
        pack_trees(forest, credits, token_budget=budget, ranks=2, inherit=False, lockstep=lockstep)
        for lockstep in (False, True)
    )
    assert_packed(meeting, forest)
    assert report_packs(meeting, forest, ranks=2).imbalance == pytest.approx(
        report_packs(apart, forest, ranks=2).imbalance
    )
    waited, paired = (report_packs(packs, forest, ranks=2, lockstep=True).imbalance for packs in (apart, meeting))
    assert report_packs(meeting, forest, ranks=2).imbalance - 1e-9 <= paired <= waited + 1e-9


@pytest.mark.parametrize(("multiple", "ranks"), [(1, 1), (16, 1), (16, 2)])
def test_padding_of_counts_the_tokens_that_ranks_add(multiple, ranks):
    (pack,) = pack_trees(*cases.batch(0), token_budget=10**6)
    shard = ContextShard(0, ranks, multiple)
    with MicroBatches([pack], None, shard) as batches:
        local = len(batches.make(0).inputs[0])
    assert padding_of(pack, shard) == local * ranks - len(pack)
    assert local % multiple == 0 and (padding_of(pack, shard) > 0) is (multiple > 1)


def test_pack_of_one_rank_is_not_cut_into_blocks_on_cuda(monkeypatch):
    """FlexAttention's blocks are not ours; a pack alone has all its tokens in order in any case."""
    packs = pack_trees(*cases.batch(0), token_budget=30)
    assert any(pack.inherited for pack in packs)
    cut = [microbatch._Local.of(pack, ContextShard(multiple_of=16)).members for pack in packs]
    monkeypatch.setattr(microbatch, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(microbatch, "share_blocks", lambda *_: pytest.fail("the pack is cut"))
    found = [microbatch._Local.of(pack, ContextShard(multiple_of=16)).members for pack in packs]
    assert all(map(np.array_equal, found, cut))


def test_pipeline_holds_as_many_packs_as_stages():
    tree = RolloutTree("wide", [0])
    for _ in range(4):
        cases.add(tree, 0, Role.MODEL, 9, np.random.default_rng(0))
    packs = pack_trees([tree], [numbered_credit(tree, 0)], token_budget=10, inherit=False)
    sizes = [len(pack) for pack in packs]
    assert len(sizes) > 2
    assert report_packs(packs, [tree], in_flight=2).live_tokens == max(map(sum, pairwise(sizes)))


def test_pack_waits_only_for_packs_that_inherit_from_it():
    tree = RolloutTree("deep", np.arange(40) % 32)
    rng = np.random.default_rng(0)
    for _ in range(6):
        cases.add(tree, 0, Role.MODEL, 30, rng)
    packs = pack_trees([tree], [numbered_credit(tree, 0)], token_budget=40)
    made = report_packs(packs, [tree])
    assert made.packs == 7 and made.computed == tree.unique_tokens
    assert made.live_tokens == 70  # the prompt and one branch at a time: the memory of a path


@settings(max_examples=60)
@given(forest=st.lists(cases.trees(), min_size=1, max_size=4))
def test_multiplicity_is_the_number_of_trajectories(forest):
    packs = pack_trees(forest, [numbered_credit(t, 0) for t in forest], token_budget=10**6)
    assert sum(int(pack.multiplicity.sum()) for pack in packs) == sum(tree.flat_tokens for tree in forest)
    assert sum(pack.attention_pairs for pack in packs) == sum(
        int(((np.arange(len(p.token_ids))[:, None] < p.subtree_end[None]) & np.tri(len(p.token_ids), dtype=bool)).sum())
        for p in packs
    )


@given(sizes=st.lists(st.integers(0, 30), max_size=40), budget=st.integers(1, 40))
def test_packs_fit_the_budget_and_waste_little(sizes, budget):
    groups = first_fit_decreasing(sizes, budget)
    assert sorted(i for group in groups for i in group) == [i for i, size in enumerate(sizes) if size]
    loads = [sum(sizes[i] for i in group) for group in groups]
    assert all(load <= budget or len(group) == 1 for load, group in zip(loads, groups, strict=True))
    # First fit: two packs that would fit into one are never left apart.
    fitting = sorted(load for load in loads if load <= budget)
    assert len(fitting) < 2 or fitting[0] + fitting[1] > budget


@given(costs=st.lists(st.integers(1, 100), max_size=30), ranks=st.integers(1, 8))
def test_rank_loads_differ_by_at_most_one_tree(costs, ranks):
    shares = divide_work(costs, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40), budget=st.integers(1, 60))
def test_balanced_packs_are_as_few_as_first_fit_needs(sizes, budget):
    groups = balanced_groups(sizes, sizes, budget)
    assert len(groups) == len(first_fit_decreasing(sizes, budget))
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in group) <= budget or len(group) == 1 for group in groups)


def test_unknown_sampling_logprobs_are_nan():
    tree = RolloutTree("t", [1, 2])
    tree.add(0, Role.MODEL, [3, 4])
    (pack,) = pack_trees([tree], [numbered_credit(tree, 0)], token_budget=10)
    assert np.isnan(pack.sampling_logprobs).all()


def test_model_token_without_predictor_is_refused():
    tree = RolloutTree("t", [])
    tree.add(0, Role.MODEL, [3])
    with pytest.raises(ValueError, match="empty prompt"):
        pack_trees([tree], [numbered_credit(tree, 0)], token_budget=10)


@pytest.mark.parametrize(("budget", "ranks"), [(0, 1), (-3, 1), (9, 0)])
def test_pack_trees_refuses_an_empty_budget_or_no_ranks(budget, ranks):
    with pytest.raises(ValueError, match=rf"token_budget={budget} and ranks={ranks} must be at least 1"):
        pack_trees(*cases.batch(0), token_budget=budget, ranks=ranks)


def test_credits_of_the_wrong_length_are_refused():
    tree = cases.grown(0)
    with pytest.raises(ValueError, match="1 trees but 0 credits"):
        pack_trees([tree], [], token_budget=10)
    with pytest.raises(ValueError, match="positive credits for"):
        pack_trees([tree], [numbered_credit(cases.grown(1), 0)], token_budget=10)
