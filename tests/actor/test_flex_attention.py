"""The CUDA core attention: its block mask is exactly the dense one, blocks without pairs are skipped, padding is zeros.

Forward passes run on a CPU too (uncompiled); gradients need a GPU.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from arpo_megatron.actor.attention_plan import share_blocks
from arpo_megatron.actor.flex_attention import (
    block_classes,
    compiled_kernel,
    flex_plan,
    flex_tree_attention,
)
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.packing.layout import ATTENTION_BLOCK, padded_length, padded_lengths
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES
from tests.actor import cases

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a gradient on CUDA only")


def packed(forest, **options):
    credits = [cases.plain_credit(tree, np.ones(len(tree.leaves())), 1.0) for tree in forest]
    return pack_trees(forest, credits, **options)


def dense_mask(key_end, positions) -> np.ndarray:
    keys = np.arange(len(key_end))
    return (keys <= positions[:, None]) & (positions[:, None] < key_end[None])


@st.composite
def plans(draw: st.DrawFn, max_tokens: int = 150):
    """Keys and queries of a whole pack, of one whose ancestors come from others, or of a context-parallel rank."""
    forest = draw(st.lists(cases.trees(max_segments=10, max_tokens=max_tokens), min_size=1, max_size=2))
    budget = draw(st.sampled_from([200, 10**6]))
    pack = draw(st.sampled_from(packed(forest, token_budget=budget)))
    ranks = draw(st.integers(1, 3))
    share = share_blocks(pack.subtree_end, pack.inherited, ranks)[draw(st.integers(0, ranks - 1))]
    positions = [np.arange(start, stop) for start, stop in share]
    return pack.subtree_end, np.concatenate([np.zeros(0, np.int64), *positions])


@settings(max_examples=80)
@given(plan=plans())
def test_block_classes_equal_those_of_the_dense_mask(plan):
    key_end, positions = plan
    if not len(positions):
        return
    whole = np.zeros(padded_lengths(len(positions), len(key_end)), bool)
    whole[: len(positions), : len(key_end)] = dense_mask(key_end, positions)
    blocks = whole.reshape(len(whole) // ATTENTION_BLOCK, ATTENTION_BLOCK, -1, ATTENTION_BLOCK).transpose(0, 2, 1, 3)
    full, partial = block_classes(key_end, positions)
    assert np.array_equal(full, blocks.all((2, 3)))
    assert np.array_equal(full | partial, blocks.any((2, 3)))
    assert not (full & partial).any()


@settings(max_examples=15)
@given(plan=plans())
def test_block_mask_equals_torchs_create_block_mask(plan):
    key_end, positions = plan
    mask = flex_plan(key_end, positions).mask
    if mask is None:
        return
    slow = create_block_mask(mask.mask_mod, None, None, *mask.shape[-2:], device="cpu", BLOCK_SIZE=ATTENTION_BLOCK)
    assert torch.equal(mask.to_dense(), slow.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(slow, name)), name
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, found = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
        for row, count in enumerate(counts.tolist()):
            assert torch.equal(found[row, :count], getattr(slow, f"{name}_indices")[0, 0, row, :count]), name


def inputs(key_end, positions, groups, *, padding=0, device="cpu", dtype=torch.float64):
    draw = torch.Generator().manual_seed(len(key_end))
    shapes = [(len(positions) + padding, 4, 16), (len(key_end), groups, 16), (len(key_end), groups, 16)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def dense_attention(query, key, value, mask, scale):
    """In float64 on a CPU, for the unpadded queries."""
    q, k, v = (t.double().cpu() for t in (query[: len(mask)], key, value))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~torch.from_numpy(mask), -torch.inf).softmax(-1), v)


@settings(max_examples=15)
@given(plan=plans(), groups=st.sampled_from([1, 2, 4]), padding=st.sampled_from([0, 5, 200]))
def test_outputs_equal_those_of_a_dense_mask_and_padding_is_zeros(plan, groups, padding):
    key_end, positions = plan
    leaves = [t.detach() for t in inputs(key_end, positions, groups, padding=padding)]
    output = flex_tree_attention(*leaves, flex_plan(key_end, positions), 0.3)
    assert output.shape == leaves[0].shape
    dense = dense_attention(*leaves, dense_mask(key_end, positions), 0.3)
    torch.testing.assert_close(output[: len(positions)], dense, rtol=1e-12, atol=1e-12)
    assert torch.equal(output[len(positions) :], torch.zeros_like(output[len(positions) :]))


def test_rank_with_only_padding_has_zero_gradients_for_keys_and_values():
    key_end, positions = np.array([3, 2, 3], np.int32), np.zeros(0, np.int64)
    leaves = inputs(key_end, positions, 2, padding=4)
    output = flex_tree_attention(*leaves, flex_plan(key_end, positions), 1.0)
    assert torch.equal(output, torch.zeros_like(output))
    output.sum().backward()
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in leaves[1:])


def test_packs_of_one_padded_length_share_one_compiled_kernel(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # of CPU_ENVIRONMENT: on a CPU the product compiles nothing
    counter = CompileCounter()
    kernel = compiled_kernel(counter)
    for n in (140, 200, 250):
        mask = flex_plan(np.full(n, n, np.int32), np.arange(n)).mask
        query, key = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
        kernel(query, key, key, block_mask=mask, scale=1.0, enable_gqa=True)
    assert counter.frame_count == 1


def test_padded_lengths_are_two_per_octave():
    lengths = np.arange(1, 20000)
    padded = np.array([padded_length(int(n)) for n in lengths])
    assert (padded >= lengths).all()
    assert (padded % ATTENTION_BLOCK == 0).all()
    assert (padded < 1.5 * lengths + ATTENTION_BLOCK).all()
    assert len(set(padded)) == 15
    assert all(padded_length(int(n)) == n for n in set(padded))


@given(data=st.data(), keys=st.integers(1, 40000))
def test_padded_queries_are_a_share_of_the_padded_keys(data, keys):
    queries = data.draw(st.integers(1, keys))
    padded, keys_padded = padded_lengths(queries, keys)
    assert keys_padded == padded_length(keys)
    assert padded >= queries
    assert not padded % ATTENTION_BLOCK
    assert keys_padded in (padded, 2 * padded, 4 * padded, 8 * padded)


def test_cut_trees_compile_few_kernels():
    """Trees with long tool results, cut into many packs, which inherit keys of many lengths."""
    trees = [MIXES["deep_search"].tree(number, 1000) for number in range(12)]
    packs = pack_trees(trees, supervised_credit(trees), token_budget=4096)
    pairs = [(len(pack), len(pack.subtree_end)) for pack in packs]
    assert len({(padded_length(queries), padded_length(keys)) for queries, keys in pairs}) > 20
    assert len({padded_lengths(*pair) for pair in pairs}) <= 18


def test_tree_computes_few_masked_pairs():
    (pack,) = packed([cases.grown(seed, samples=16, length=200) for seed in range(2)], token_budget=10**6)
    plan = flex_plan(pack.subtree_end, np.arange(len(pack)))
    assert plan.pairs < 2.5 * pack.attention_pairs
    assert plan.pairs < 0.5 * len(pack) ** 2


@pytest.mark.parametrize(
    ("key_end", "positions", "fault"),
    [
        ([2, 1], [0, 1], "own subtree"),
        ([2, 2], [1, 0], "ascend"),
        ([2, 2], [0, 0], "ascend"),
        ([2, 2], [0, 2], "among the 2 keys"),
        ([2, 2], [-1, 1], "among the 2 keys"),
    ],
)
def test_flex_plan_refuses_invalid_positions(key_end, positions, fault):
    with pytest.raises(ValueError, match=fault):
        flex_plan(np.array(key_end, np.int32), np.array(positions))


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("budget", [200, 10**6])
def test_outputs_and_gradients_on_a_gpu_equal_those_of_a_dense_mask(dtype, tolerance, groups, budget):
    for pack in packed([cases.grown(seed, samples=8, length=40) for seed in range(3)], token_budget=budget):
        key_end, positions = pack.subtree_end, np.arange(pack.inherited, len(pack.subtree_end))
        leaves = inputs(key_end, positions, groups, padding=7, device="cuda", dtype=dtype)
        output = flex_tree_attention(*leaves, flex_plan(key_end, positions, "cuda"), 0.25)
        weights = torch.randn(output.shape, dtype=torch.float64)
        found = torch.autograd.grad((output * weights.to(output)).sum(), leaves)
        exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
        dense = dense_attention(*exact, dense_mask(key_end, positions), 0.25)
        expected = torch.autograd.grad((dense * weights[: len(positions)]).sum(), exact)
        for actual, right in zip([output[: len(positions)], *found], [dense, *expected], strict=True):
            error = (actual.double().cpu() - right).norm() / right.norm()
            assert error < tolerance, error


@needs_gpu
def test_padding_causes_no_nan_gradients_on_a_gpu():
    key_end, positions = np.full(130, 130, np.int32), np.arange(130)  # the second query block is almost empty
    leaves = inputs(key_end, positions, 2, padding=300, device="cuda", dtype=torch.float32)
    output = flex_tree_attention(*leaves, flex_plan(key_end, positions, "cuda"), 0.25)
    output.square().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert not leaves[0].grad[130:].any()


@needs_gpu
def test_sibling_branch_changes_no_bit_on_a_gpu():
    (pack,) = packed([cases.grown(0, samples=8, length=60)], token_budget=10**6)
    key_end, positions = pack.subtree_end, np.arange(len(pack))
    leaf = int(np.flatnonzero(key_end == positions + 1)[0])  # the end of the first branch
    leaves = [t.detach() for t in inputs(key_end, positions, 2, device="cuda", dtype=torch.bfloat16)]
    plan = flex_plan(key_end, positions, "cuda")
    before = flex_tree_attention(*leaves, plan, 0.25)
    for tensor in leaves[1:]:
        tensor[leaf] = 100.0
    after = flex_tree_attention(*leaves, plan, 0.25)
    others = positions != leaf
    assert torch.equal(before[others], after[others])
