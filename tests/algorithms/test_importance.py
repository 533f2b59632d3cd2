"""Importance weights of trajectories that another policy has sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.algorithms.credit import tree_credits
from arpo_megatron.algorithms.importance import trajectory_weights
from tests.algorithms import flat


@given(forest=flat.forests(), seed=st.integers(0, 1000))
def test_trajectory_weight_is_the_product_of_ratios_up_to_the_limit(forest, seed):
    rng = np.random.default_rng(seed)
    log_ratios = [rng.normal(0, 0.5, tree.unique_tokens) for tree in forest]
    for values in log_ratios:
        values[rng.random(len(values)) < 0.2] = np.nan  # unknown
    found = trajectory_weights(forest, log_ratios, limit=2.0)
    for tree, weights, values in zip(forest, found, log_ratios, strict=True):
        for weight, leaf in zip(weights, tree.leaves(), strict=True):
            assert weight == pytest.approx(min(2.0, np.exp(np.nansum(values[flat.places(tree, leaf)]))))


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
