"""Training a tree equals training its trajectories: same loss and gradient in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpo_megatron.actor.losses import linear_loss, policy_loss
from arpo_megatron.actor.microbatch import MicroBatches
from arpo_megatron.actor.model import build_model
from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.algorithms.losses.ppo import Ppo
from arpo_megatron.config import AlgorithmConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
LOSS, CONFIG = Ppo(**CLIP), AlgorithmConfig()
WEIGHT = 2.0**-5


@pytest.fixture(scope="module")
def models(one_rank):
    torch.manual_seed(3)
    built = {}
    for spec in (cases.QWEN3, cases.QWEN2, cases.LLAMA):
        model = build_model(spec, ParallelConfig(), "float64")
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # away from the symmetric start
                parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.1))
        built[spec.family] = (spec, model)
    return built


def ppo(batch, output) -> torch.Tensor:
    return policy_loss(LOSS, *output, batch.old_logprobs, batch.positive, batch.negative, batch.weight, CONFIG)[0]


def evaluate(loss, model):
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    return loss.detach(), cases.gradients(model)


def assert_same(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    scale = max(g.abs().max().item() for g in expected[1].values()) + 1e-12
    for name, gradient in expected[1].items():
        assert (actual[1][name] - gradient).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forest=st.lists(cases.trees(), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_loss_and_every_gradient_equal_those_of_the_flattened_trajectories(models, family, forest, seed):
    spec, model = models[family]
    advantages = [cases.dyadic_advantages(tree, seed + i) for i, tree in enumerate(forest)]
    credits = [cases.plain_credit(t, a, WEIGHT) for t, a in zip(forest, advantages, strict=True)]
    packs = pack_trees(forest, credits, token_budget=40)
    parameters = dict(model.named_parameters())
    flat = sum(
        reference.flat_ppo(parameters, t, a, WEIGHT, spec, **CLIP) for t, a in zip(forest, advantages, strict=True)
    )
    assert_same(cases.backward(model, packs, ppo), evaluate(flat, model))


def test_clipping_on_both_sides_equals_that_of_the_trajectories(models):
    spec, model = models["qwen3"]
    tree = cases.grown(5, samples=8)
    advantages = cases.dyadic_advantages(tree, 5)
    pack = pack_trees([tree], [cases.plain_credit(tree, advantages, WEIGHT)], token_budget=10**6)[0]
    ((logprobs, _),) = cases.outputs(model, [pack])
    with MicroBatches([pack], [pack.sampling_logprobs]) as batches:
        batch = batches.make(0)
    rest = (batch.old_logprobs, batch.positive, batch.negative, batch.weight)
    _, stats = policy_loss(LOSS, logprobs, logprobs, *rest, CONFIG)
    summary = UpdateStats.of(stats.sums, stats.ratio_max, grad_norm=0.0, lr=0.0, skipped=False)
    assert 0.1 < summary.clip_high_share + summary.clip_low_share < 0.9
    expected = reference.flat_ppo(dict(model.named_parameters()), tree, advantages, WEIGHT, spec, **CLIP)
    assert_same(cases.backward(model, [pack], ppo), evaluate(expected, model))


def test_loss_and_gradient_do_not_depend_on_packing(models):
    _, model = models["qwen3"]
    forest = [cases.grown(seed) for seed in range(4)]
    advantages = [cases.dyadic_advantages(tree, seed) for seed, tree in enumerate(forest)]
    credits = [cases.plain_credit(t, a, WEIGHT) for t, a in zip(forest, advantages, strict=True)]
    whole = cases.backward(model, pack_trees(forest, credits, token_budget=10**6), ppo)
    flat = [
        (single, cases.plain_credit(single, np.array([advantage]), WEIGHT))
        for tree, values in zip(forest, advantages, strict=True)
        for single, advantage in zip(cases.flat_trees(tree), values, strict=True)
    ]
    layouts = {
        "a pack a tree": [
            p for t, c in zip(forest, credits, strict=True) for p in pack_trees([t], [c], token_budget=10**6)
        ],
        "two ranks": pack_trees(forest, credits, token_budget=150, ranks=2),
        "cut, inheriting": pack_trees(forest, credits, token_budget=20),
        "cut, repeating": pack_trees(forest, credits, token_budget=40, inherit=False),
        "another order": pack_trees(forest[::-1], credits[::-1], token_budget=10**6),
        "flat, one pack": pack_trees(*zip(*flat, strict=True), token_budget=10**6),
        "flat, several packs": pack_trees(*zip(*flat, strict=True), token_budget=90),
    }
    assert len(layouts["flat, several packs"]) > 3
    for packs in layouts.values():
        assert_same(cases.backward(model, packs, ppo), whole)


def test_supervised_loss_is_the_weighted_negative_log_likelihood(models):
    spec, model = models["qwen2"]
    tree = cases.grown(2)
    pack = pack_trees([tree], [cases.plain_credit(tree, np.ones(len(tree.leaves())), WEIGHT)], token_budget=1000)[0]
    found = cases.backward(model, [pack], lambda batch, output: linear_loss(*output, batch.weight)[0], old=False)
    expected = torch.zeros((), dtype=torch.float64)
    for leaf in tree.leaves():
        mask = torch.from_numpy(tree.trajectory(leaf).loss_mask[1:])
        logprobs = reference.trajectory_logprobs(dict(model.named_parameters()), tree, leaf, spec)
        expected = expected - WEIGHT * (logprobs * mask).sum()
    assert_same(found, evaluate(expected, model))


def test_recomputation_changes_nothing(models):
    spec, model = models["qwen3"]
    again = build_model(spec, ParallelConfig(recompute="full"), "float64")
    again.load_state_dict(model.state_dict())
    tree = cases.grown(8)
    packs = pack_trees([tree], [cases.plain_credit(tree, cases.dyadic_advantages(tree, 8), WEIGHT)], token_budget=1000)
    first, second = cases.backward(model, packs, ppo), cases.backward(again, packs, ppo)
    assert first[0] == second[0]
    assert all(torch.equal(gradient, second[1][name]) for name, gradient in first[1].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_branch_sees_neither_siblings_nor_other_trees(one_rank, dtype):
    torch.manual_seed(4)
    model = build_model(cases.QWEN3, ParallelConfig(), dtype)
    forest = [cases.grown(seed, samples=8, length=40) for seed in range(3)]
    credits = [cases.plain_credit(tree, np.ones(len(tree.leaves())), WEIGHT) for tree in forest]
    (pack,) = pack_trees(forest, credits, token_budget=10**6)
    changed_leaf = forest[1].leaves()[3]
    changed = dataclasses.replace(
        forest[1].segments[changed_leaf], token_ids=(forest[1].segments[changed_leaf].token_ids + 7) % cases.VOCABULARY
    )
    forest[1].segments[changed_leaf] = changed
    (other,) = pack_trees(forest, credits, token_budget=10**6)
    moved = pack.token_ids != other.token_ids
    assert 0 < moved.sum() == len(changed)
    (before,), (after,) = (cases.outputs(model, [p]) for p in (pack, other))
    # Its own tokens change, the prediction of its first token's id too, and nothing else by a single bit.
    kept = torch.from_numpy(pack.target_ids == other.target_ids)
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[kept], second[kept])
    assert not torch.equal(before[0][~kept], after[0][~kept])


def test_bfloat16_agrees_with_float32(one_rank):
    tree = cases.grown(1)
    (pack,) = pack_trees([tree], [cases.plain_credit(tree, np.ones(len(tree.leaves())), WEIGHT)], token_budget=1000)
    outputs = []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(5)
        model = build_model(cases.QWEN3, ParallelConfig(), dtype)
        outputs.append(cases.outputs(model, [pack])[0][0])
        assert outputs[-1].dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.03)
