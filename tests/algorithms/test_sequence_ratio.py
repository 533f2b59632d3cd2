"""Sequence-level losses on a tree equal those of the flattened trajectories, gradient included."""

import cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.credit import tree_credits
from arpo_megatron.algorithms.sequence_ratio import gspo, trajectory_weights
from arpo_megatron.tree import Role, RolloutTree


def token_ids_of_paths(tree: RolloutTree) -> list[np.ndarray]:
    """For each leaf the places of its trajectory's MODEL tokens, in segment-index order."""
    starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
    return [
        np.concatenate(
            [np.arange(starts[s], starts[s + 1]) for s in tree.path(leaf) if tree.segments[s].role is Role.MODEL]
            or [np.zeros(0, int)]
        )
        for leaf in tree.leaves()
    ]


def flat_gspo(trees, advantages, new, old, weights, low, high) -> torch.Tensor:
    """The textbook loss, trajectory by trajectory, with autograd through the ratios."""
    count = sum(len(tree.leaves()) for tree in trees)
    total = torch.zeros((), dtype=torch.float64)
    for tree, own, n, o, v in zip(trees, advantages, new, old, weights, strict=True):
        for places, advantage, weight in zip(token_ids_of_paths(tree), own, v, strict=True):
            if len(places):
                s = ((n[places] - o[places]).sum() / len(places)).exp()
                objective = torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage)
                total = total - weight / count * objective
            else:
                total = total - weight / count * advantage  # ratio 1, no gradient
    return total


@settings(max_examples=60)
@given(forest=st.lists(cases.trees(), min_size=1, max_size=3), seed=st.integers(0, 10**6), spread=st.floats(0.01, 2))
def test_loss_and_gradient_are_those_of_the_flattened_trajectories(forest, seed, spread):
    rng = np.random.default_rng(seed)
    new = [torch.from_numpy(rng.normal(-1, spread, tree.unique_tokens)).requires_grad_() for tree in forest]
    old = [torch.from_numpy(rng.normal(-1, spread, tree.unique_tokens)) for tree in forest]
    advantages = [rng.normal(0, 1, len(tree.leaves())) for tree in forest]
    weights = [rng.uniform(0, 2, len(tree.leaves())) for tree in forest]
    exact = flat_gspo(forest, advantages, new, old, weights, 0.1, 0.2)
    log_ratios = [(n - o).detach().numpy() for n, o in zip(new, old, strict=True)]
    found = gspo(forest, advantages, log_ratios, clip_low=0.1, clip_high=0.2, trajectory_weights=weights)
    assert found.loss == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
    if exact.requires_grad:
        gradients = torch.autograd.grad(exact, new, allow_unused=True)
        for credit, gradient in zip(found.credits, gradients, strict=True):
            coefficient = torch.from_numpy(credit.positive.astype(np.float64) + credit.negative)
            expected = torch.zeros_like(coefficient) if gradient is None else gradient
            torch.testing.assert_close(-coefficient, expected, rtol=1e-5, atol=1e-7)  # credits are float32


def test_extreme_ratios_stay_finite_and_clipped_trajectories_are_counted():
    tree = RolloutTree("t", [1])
    for _ in range(2):
        tree.add(0, Role.MODEL, [2, 3])
    found = gspo([tree], [[1.0, -1.0]], [np.array([0, 900, 900, -900, -900.0])], clip_low=0.1, clip_high=0.1)
    assert np.isfinite(found.loss) and (found.clipped_high, found.clipped_low) == (1, 1)
    assert not found.credits[0].positive.any() and not found.credits[0].negative.any()
    assert found.statistics()["clip_low_share"] == 0.5


def test_on_policy_ratios_are_exactly_one():
    tree = cases.grown(3)
    found = gspo([tree], [np.ones(len(tree.leaves()))], [np.zeros(tree.unique_tokens)], clip_low=0.1, clip_high=0.1)
    assert found.ratios[0].tolist() == [1.0] * len(tree.leaves()) and found.statistics()["ratio_max"] == 1.0


@settings(max_examples=40)
@given(tree=cases.trees(), seed=st.integers(0, 1000))
def test_a_trajectory_weighs_its_product_of_ratios_up_to_the_limit(tree, seed):
    rng = np.random.default_rng(seed)
    log_ratios = rng.normal(0, 0.5, tree.unique_tokens)
    log_ratios[rng.random(tree.unique_tokens) < 0.2] = np.nan  # unknown
    (weights,) = trajectory_weights([tree], [log_ratios], limit=2.0)
    for weight, places in zip(weights, token_ids_of_paths(tree), strict=True):
        assert weight == pytest.approx(min(2.0, np.exp(np.nansum(log_ratios[places]))))


def test_weights_of_trajectories_multiply_their_credit():
    tree = cases.grown(5)
    advantages = cases.dyadic_advantages(tree, 1)
    weights = np.linspace(0, 2, len(advantages))
    keywords = {"aggregation": "token-mean", "attribution": "soft"}
    (weighted,) = tree_credits([tree], [advantages], trajectory_weights=[weights], **keywords)
    (scaled,) = tree_credits([tree], [advantages * weights], **keywords)
    np.testing.assert_allclose(weighted.positive, scaled.positive, rtol=1e-6)
    np.testing.assert_allclose(weighted.negative, scaled.negative, rtol=1e-6)
