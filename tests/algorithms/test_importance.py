"""Importance weights of tokens and trajectories that another policy has sampled, against flattened float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.credit import scale_credits, tree_credits
from arpo_megatron.algorithms.importance import sampling_weights
from tests.algorithms import flat

LOW, HIGH = 0.5, 2.0


def bounded(ratios: np.ndarray, correction: str) -> np.ndarray:
    if correction == "icepop":
        return np.where((ratios >= LOW) & (ratios <= HIGH), ratios, 0.0)
    return np.minimum(ratios, HIGH)


def flattened(forest, log_ratios, correction: str) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Return the weights of each trajectory's tokens, divided by their mean, and all weights before that."""
    rows = []
    for tree, values in zip(forest, log_ratios, strict=True):
        known = [np.nan_to_num(values)[flat.places(tree, leaf)] for leaf in tree.leaves()]
        if correction == "geometric":
            known = [own.mean()[None] if len(own) else np.zeros(1) for own in known]
        if correction == "product":
            known = [own.sum()[None] for own in known]
        rows.append([bounded(np.exp(own), correction) for own in known])
    everything = np.concatenate([own for row in rows for own in row])
    mean = everything.mean() if everything.size and everything.any() else 1.0
    return [[own / mean for own in row] for row in rows], everything


@pytest.mark.parametrize("correction", ["tis", "icepop", "geometric", "product"])
@given(forest=flat.forests(), seed=st.integers(0, 1000))
def test_weights_equal_those_of_the_flattened_trajectories(correction, forest, seed):
    rng = np.random.default_rng(seed)
    log_ratios = [rng.normal(0, 0.7, tree.unique_tokens) for tree in forest]
    for values in log_ratios:
        values[rng.random(len(values)) < 0.2] = np.nan  # unknown
    found = sampling_weights(forest, log_ratios, correction, low=LOW, high=HIGH)
    expected, everything = flattened(forest, log_ratios, correction)
    for number, tree in enumerate(forest):
        for row, leaf in enumerate(tree.leaves()):
            spots = flat.places(tree, leaf)
            weights = found.tokens[number][spots] * found.leaves[number][row]
            np.testing.assert_allclose(weights, np.broadcast_to(expected[number][row], len(spots)), rtol=1e-12)
    if everything.size:
        assert found.statistics["weights_mean"] == pytest.approx(everything.mean())
    if everything.any():
        ess = everything.sum() ** 2 / (everything**2).sum() / len(everything)
        assert found.statistics["weights_ess"] == pytest.approx(ess)


@given(forest=flat.forests(), seed=st.integers(0, 1000))
def test_no_correction_changes_nothing_and_reports_nothing(forest, seed):
    log_ratios = [np.random.default_rng(seed).normal(0, 1, tree.unique_tokens) for tree in forest]
    found = sampling_weights(forest, log_ratios, "none", low=LOW, high=HIGH)
    assert all((own == 1).all() for own in (*found.leaves, *found.tokens)) and not found.statistics


@given(forest=flat.forests(), seed=st.integers(0, 1000))
def test_trajectory_weights_multiply_the_credit(forest, seed):
    rng = np.random.default_rng(seed)
    advantages = [rng.normal(0, 1, len(tree.leaves())) for tree in forest]
    weights = [rng.uniform(0, 2, len(own)) for own in advantages]
    weighted = tree_credits(forest, advantages, aggregation="token-mean", trajectory_weights=weights)
    products = [a * w for a, w in zip(advantages, weights, strict=True)]
    for one, other in zip(weighted, tree_credits(forest, products, aggregation="token-mean"), strict=True):
        np.testing.assert_allclose(one.positive, other.positive, rtol=1e-6)
        np.testing.assert_allclose(one.negative, other.negative, rtol=1e-6)


@given(forest=flat.forests(), seed=st.integers(0, 1000))
def test_token_weights_multiply_all_coefficients(forest, seed):
    rng = np.random.default_rng(seed)
    advantages = [rng.normal(0, 1, len(tree.leaves())) for tree in forest]
    plain = tree_credits(forest, advantages, aggregation="sequence-mean")
    factors = [rng.uniform(0, 2, tree.unique_tokens) for tree in forest]
    for one, other, factor in zip(scale_credits(plain, factors), plain, factors, strict=True):
        for name in ("positive", "negative", "weight"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name) * factor, rtol=1e-6)
