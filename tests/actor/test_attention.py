"""The blocks of tree attention compute exactly the dense mask, and few masked pairs."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.actor.attention import tree_attention
from arpo_megatron.actor.attention_plan import (
    CALL_COST_PAIRS,
    MAX_BLOCK,
    cut_blocks,
    plan_attention,
    share_blocks,
)
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases


def subtree_ends(forest) -> np.ndarray:
    credits = [cases.plain_credit(tree, np.ones(len(tree.leaves())), 1.0) for tree in forest]
    (pack,) = pack_trees(forest, credits, token_budget=10**6, share_prompt=False)
    return pack.subtree_end


def dense_mask(subtree_end: np.ndarray) -> np.ndarray:
    n = len(subtree_end)
    queries, keys = np.arange(n)[:, None], np.arange(n)[None]
    return (keys <= queries) & (queries < subtree_end[None])


forests = st.one_of(
    st.lists(cases.trees(), min_size=1, max_size=4),  # tokens of one branch
    st.lists(cases.trees(max_segments=10, max_tokens=150), min_size=1, max_size=2),  # chains longer than a block
)


@settings(max_examples=60)
@given(forest=forests)
def test_plan_covers_exactly_the_dense_mask(forest):
    ends = subtree_ends(forest)
    plan = plan_attention(ends)
    covered = np.zeros((len(ends), len(ends)), int)
    pieces = np.cumsum([0, *plan.piece_sizes])
    for block, keys, mask in zip(plan.blocks, plan.keys, plan.masks, strict=True):
        assert 0 < block.stop - block.start <= MAX_BLOCK
        positions = np.concatenate([np.arange(pieces[piece], pieces[piece + 1]) for piece in keys])
        covered[block.start : block.stop, positions] += mask.numpy()
    assert np.array_equal(covered, dense_mask(ends))


@settings(max_examples=15)
@given(forest=forests, groups=st.sampled_from([1, 2, 4]))
def test_outputs_and_gradients_equal_those_of_one_dense_call(forest, groups):
    ends = subtree_ends(forest)
    n, heads, dim = len(ends), 4, 8
    generator = torch.Generator().manual_seed(n)
    leaves = [
        torch.randn(n, h, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, groups, groups)
    ]
    output = tree_attention(*leaves, plan_attention(ends), 0.3)
    q, k, v = (t.repeat_interleave(heads // t.shape[1], 1).transpose(0, 1) for t in leaves)
    scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~torch.from_numpy(dense_mask(ends)), -torch.inf)
    dense = (scores.softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(output, dense, rtol=1e-12, atol=1e-12)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    mine = torch.autograd.grad((output * weights).sum(), leaves)
    theirs = torch.autograd.grad((dense * weights).sum(), leaves)
    for actual, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def cost(plan) -> int:
    return plan.pairs + CALL_COST_PAIRS * len(plan.blocks)


def test_short_sequences_share_calls_and_long_ones_are_cut():
    short = np.repeat(np.arange(1, 65) * 45, 45).astype(np.int32)
    assert 20 <= len(plan_attention(short).blocks) <= 40
    long = np.full(4096, 4096, np.int32)
    assert len(plan_attention(long).blocks) >= 4096 // MAX_BLOCK
    assert plan_attention(long).pairs < 0.6 * 4096**2


def test_context_ranks_are_balanced_by_the_given_cost_model():
    ends = np.concatenate([np.full(2048, 2048), 2048 + np.repeat(np.arange(1, 65) * 32, 32)]).astype(np.int32)
    attention, linear = CostModel(token_pairs=0.0), CostModel(token_pairs=1e6)

    def gap(divided_by: CostModel, measured_by: CostModel) -> float:
        shares = share_blocks(ends, 0, 3, divided_by)
        sizes = [[(b - a, (b - a) * (int((ends[:a] > a).sum()) + b - a)) for a, b in share] for share in shares]
        work = [sum(measured_by.cost(size, pairs, 0) for size, pairs in share) for share in sizes]
        return max(work) / min(work)

    assert gap(attention, attention) < 1.15 and gap(linear, linear) < 1.15
    assert gap(attention, linear) > 1.3


def test_forked_tree_costs_less_than_its_flattened_trajectories():
    forest = [cases.grown(seed, samples=16, length=40) for seed in range(4)]
    flat = [single for tree in forest for single in cases.flat_trees(tree)]
    assert cost(plan_attention(subtree_ends(forest))) < cost(plan_attention(subtree_ends(flat)))


@settings(max_examples=40)
@given(forest=st.lists(cases.trees(max_segments=6, max_tokens=3), min_size=1, max_size=2))
def test_cut_blocks_finds_the_cheapest_cut(forest):
    ends = subtree_ends(forest)
    n = len(ends)
    edges = [0, *(t for t in range(1, n) if ends[t] != ends[t - 1]), n]
    if len(edges) > 9:
        edges = [0, n]

    def cost_of(spans):
        depth = [int((ends[:a] > a).sum()) for a, _ in spans]
        return sum((b - a) * (d + b - a) + CALL_COST_PAIRS for (a, b), d in zip(spans, depth, strict=True))

    best = min(
        cost_of(list(pairwise(chosen)))
        for bits in range(2 ** max(0, len(edges) - 2))
        for chosen in [[0, *(e for i, e in enumerate(edges[1:-1]) if bits >> i & 1), n]]
    )
    assert cost_of(cut_blocks(ends)) <= best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close(dtype):
    ends = subtree_ends([cases.grown(seed) for seed in range(3)])
    q, k, v = torch.randn(3, len(ends), 2, 16, dtype=torch.float64)
    exact = tree_attention(q, k, v, plan_attention(ends), 0.25)
    rough = tree_attention(q.to(dtype), k.to(dtype), v.to(dtype), plan_attention(ends), 0.25)
    assert rough.dtype == dtype
    torch.testing.assert_close(rough.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-2)
