"""Sequence-level ratios from packs to gradients, against flat float64."""

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.batch import Batch, finish_credit
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")

LOW, HIGH, LIMIT = 0.1, 0.2, 1.5


@pytest.mark.parametrize("budget", [10**6, 24])
def test_gradient_equals_that_of_the_flattened_trajectories(budget):
    torch.manual_seed(1)
    algorithm = AlgorithmConfig(
        loss="gspo", clip_low=LOW, clip_high=HIGH, sampling_correction="geometric", sampling_ratio_max=LIMIT
    )
    actor = Actor(cases.job(algorithm=algorithm), cases.QWEN3, None, optimizer=OptimizerConfig(), total_updates=1)
    forest, credits = cases.batch(2)
    advantages = [cases.dyadic_advantages(tree, i) for i, tree in enumerate(forest)]
    packs = pack_trees(forest, credits, token_budget=budget)
    before, old = cases.parameters_of(actor), actor.logprobs(packs)
    cases.move(actor)
    now = cases.parameters_of(actor)
    bounds = {"correction": "geometric", "limit": LIMIT, "clip_low": LOW, "clip_high": HIGH}
    loss, _ = reference.flat_off_policy(now, before, forest, advantages, cases.QWEN3, ratio="sequence", **bounds)
    loss.backward()

    ready = finish_credit(actor, Batch(packs, forest, advantages), old, actor.config, on_policy=False)
    rows = actor.accumulate(ready.packs, ready.old_logprobs, ready.loss)
    assert ready.statistics["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert 0 < ready.statistics["clip_high_share"] + ready.statistics["clip_low_share"] < 1
    assert actor._stats(rows).kl_old > 0
    cases.assert_gradients(actor, now)


def test_finish_credit_detects_a_pass_with_other_weights():
    torch.manual_seed(1)
    algorithm = AlgorithmConfig(loss="gspo")
    actor = Actor(cases.job(algorithm=algorithm), cases.QWEN3, None, optimizer=OptimizerConfig(), total_updates=2)
    forest, credits = cases.batch(2)
    advantages = [cases.dyadic_advantages(tree, i) for i, tree in enumerate(forest)]
    batch = Batch(pack_trees(forest, credits, token_budget=60), forest, advantages)
    old = actor.logprobs(batch.packs)
    for shift, seen in ((0.0, False), (0.7, True)):
        ready = finish_credit(actor, batch, [o + np.float32(shift) for o in old], actor.config, on_policy=True)
        rows = actor.accumulate(ready.packs, ready.old_logprobs, ready.loss)
        assert (actor._stats(rows).kl_old > 0) is seen


@pytest.mark.parametrize("correction", ["tis", "icepop", "geometric", "product"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_update_reports_its_importance_weights(loss, correction):
    algorithm = AlgorithmConfig(loss=loss, sampling_correction=correction, sampling_ratio_max=LIMIT)
    actor = Actor(cases.job(algorithm=algorithm), cases.QWEN3, None, optimizer=OptimizerConfig(), total_updates=1)
    forest, credits = cases.batch(2)
    advantages = [cases.dyadic_advantages(tree, i) for i, tree in enumerate(forest)]
    batch = Batch(pack_trees(forest, credits, token_budget=10**6), forest, advantages)
    below = 1.0 if correction == "icepop" else 0.0
    for apart, share in ((-1.0, below), (0.0, 0.0), (1.0, 1.0)):  # nats per token
        old = [pack.sampling_logprobs + np.float32(apart) for pack in batch.packs]
        ready = finish_credit(actor, batch, old, actor.config, on_policy=True)
        assert ready.statistics["weights_truncated"] == pytest.approx(share)
        assert ready.statistics["kl_sampling"] == pytest.approx(np.expm1(apart) - apart, abs=1e-5)
    uncorrected = cases.job(algorithm=AlgorithmConfig(loss=loss))
    ready = finish_credit(actor, batch, old, uncorrected, on_policy=True)
    assert "weights_mean" not in ready.statistics
