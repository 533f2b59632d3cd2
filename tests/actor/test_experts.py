"""A mixture of experts on a tree: outputs, gradients, the router's loss and the load of its trajectories."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpo_megatron.actor.losses import policy_loss
from arpo_megatron.actor.model import build_model
from arpo_megatron.actor.moe_router import begin_pass, finish_pass
from arpo_megatron.algorithms.losses.ppo import Ppo
from arpo_megatron.config import AlgorithmConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
WEIGHT, COEFFICIENT = 2.0**-5, 0.7


def built(coefficient: float, **layout):
    torch.manual_seed(3)
    model = build_model(cases.QWEN3_MOE, ParallelConfig(**layout), "float64", balance_coefficient=coefficient)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def model(one_rank):
    return built(0.0)


@pytest.fixture(scope="module")
def balanced(one_rank):
    return built(COEFFICIENT)


def ppo(batch, output) -> torch.Tensor:
    rest = (batch.old_logprobs, batch.positive, batch.negative, batch.weight)
    return policy_loss(Ppo(**CLIP), *output, *rest, AlgorithmConfig())[0]


def nothing(batch, output) -> torch.Tensor:
    """Return a zero policy loss, so that only the router has a gradient."""
    return 0.0 * output[0].sum()


def evaluate(loss, model):
    model.zero_grad()
    loss.backward()
    return loss.detach(), cases.gradients(model)


def assert_same(actual: dict, expected: dict) -> None:
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max().item() <= 1e-10 * scale, name


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forest=st.lists(cases.trees(), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_loss_and_every_gradient_equal_those_of_the_flattened_trajectories(model, forest, seed):
    advantages = [cases.dyadic_advantages(tree, seed + i) for i, tree in enumerate(forest)]
    credits = [cases.plain_credit(t, a, WEIGHT) for t, a in zip(forest, advantages, strict=True)]
    parameters = dict(model.named_parameters())
    flat = sum(
        reference.flat_ppo(parameters, t, a, WEIGHT, cases.QWEN3_MOE, **CLIP)
        for t, a in zip(forest, advantages, strict=True)
    )
    loss, gradients = cases.backward(model, pack_trees(forest, credits, token_budget=40), ppo)
    expected = evaluate(flat, model)
    torch.testing.assert_close(loss, expected[0], rtol=1e-10, atol=1e-10)
    scale = max(gradient.abs().max().item() for gradient in expected[1].values()) + 1e-12
    for name, gradient in expected[1].items():
        assert (gradients[name] - gradient).abs().max().item() <= 1e-10 * scale, name


def packings(forest) -> dict:
    credits = [cases.plain_credit(tree, cases.dyadic_advantages(tree, 1), WEIGHT) for tree in forest]
    singles = [single for tree in forest for single in cases.flat_trees(tree)]
    alone = [cases.plain_credit(single, np.ones(1), WEIGHT) for single in singles]
    return {
        "one pack": pack_trees(forest, credits, token_budget=10**6),
        "a pack a tree": pack_trees(forest, credits, token_budget=60),
        "cut, ancestors inherited": pack_trees(forest, credits, token_budget=16),
        "cut, ancestors repeated": pack_trees(forest, credits, token_budget=24, inherit=False),
        "flat": pack_trees(singles, alone, token_budget=90, share_prompt=False),
    }


def level(model) -> None:
    for layer in model.decoder.layers:
        layer.mlp.router.load.fill_(1 / cases.QWEN3_MOE.experts.count)


def run(model, packs, loss=nothing):
    """Run a pass; return its gradients and the balance of its experts."""
    begin_pass([model], float(sum(int(pack.multiplicity.sum()) for pack in packs)))
    _, gradients = cases.backward(model, packs, loss)
    return gradients, finish_pass([model], keep_load=True)


def test_router_gradient_equals_that_of_the_trajectories_in_every_packing(balanced):
    forest = [cases.grown(seed) for seed in range(3)]
    parameters = dict(balanced.named_parameters())
    with torch.no_grad():
        loss, load = reference.flat_balance(parameters, forest, cases.QWEN3_MOE)
    _, expected = evaluate(COEFFICIENT * reference.flat_balance(parameters, forest, cases.QWEN3_MOE, load)[0], balanced)
    for name, packs in packings(forest).items():
        level(balanced)
        before, figures = run(balanced, packs)  # measures the load; a level one pulls nowhere
        assert max(gradient.abs().max() for gradient in before.values()) < 1e-15, name
        assert torch.equal(loads(balanced), load), name
        assert figures.busiest == pytest.approx(float(load.max()) * 6, rel=1e-12)
        assert figures.loss == pytest.approx(float(loss) / cases.QWEN3_MOE.layers, rel=1e-10)
        assert_same(run(balanced, packs)[0], expected)


def loads(model) -> torch.Tensor:
    return torch.stack([layer.mlp.router.load for layer in model.decoder.layers])


def test_recomputation_changes_neither_router_gradient_nor_load(balanced):
    again = built(COEFFICIENT, recompute="full")
    again.load_state_dict(balanced.state_dict())
    packs = packings([cases.grown(seed) for seed in range(2)])["a pack a tree"]
    for model in (balanced, again):
        level(model)
        run(model, packs)
    assert torch.equal(loads(balanced), loads(again))
    first, second = run(balanced, packs, ppo)[0], run(again, packs, ppo)[0]
    assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())


def test_balancing_loss_needs_begin_pass(one_rank):
    fresh = built(COEFFICIENT)
    with pytest.raises(RuntimeError, match="needs begin_pass"):
        cases.backward(fresh, packings([cases.grown(1)])["one pack"], nothing)


def test_dense_model_has_no_expert_balance(one_rank):
    dense = build_model(cases.QWEN3, ParallelConfig(), "float32")
    begin_pass([dense], 1.0)
    assert finish_pass([dense], keep_load=True) is None
