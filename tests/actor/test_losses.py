"""The loss of a shared token, against PPO-clip computed copy by copy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.actor.losses import linear_loss, policy_loss
from arpo_megatron.actor.update_stats import HISTOGRAM_BINS, HISTOGRAM_BOUND, UpdateStats, ratio_quantile
from arpo_megatron.algorithms.components import make_policy_loss
from arpo_megatron.algorithms.losses.ppo import Ppo
from arpo_megatron.config import AlgorithmConfig

finite = st.floats(-3, 3)
CLIP = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=None)
DUAL = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ppo(new, old, positive, negative, config=CLIP, *, weight=None, entropies=None, reference=None):
    blank = torch.zeros_like(new)
    weight, entropies = blank if weight is None else weight, blank if entropies is None else entropies
    return policy_loss(make_policy_loss(config), new, entropies, old, positive, negative, weight, config, reference)


def summed(*stats) -> UpdateStats:
    sums = sum(s.sums for s in stats)
    return UpdateStats.of(sums, max(s.ratio_max for s in stats), grad_norm=0.0, lr=0.0, skipped=False)


@given(
    log_ratio=finite,
    copies=st.lists(st.tuples(st.floats(0.01, 1), finite), min_size=1, max_size=5),
    clip_low=st.floats(0, 0.9),
    clip_high=st.floats(0, 2),
    dual_clip=st.none() | st.floats(1.01, 5),
)
def test_shared_token_loss_equals_the_sum_over_its_copies(log_ratio, copies, clip_low, clip_high, dual_clip):
    ratio, expected = math.exp(log_ratio), 0.0
    for weight, advantage in copies:
        objective = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            objective = max(objective, dual_clip * advantage)
        expected -= weight * objective
    positive = tensor(sum(w * max(a, 0) for w, a in copies))
    negative = tensor(sum(w * min(a, 0) for w, a in copies))
    config = AlgorithmConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss, _ = ppo(tensor(log_ratio), tensor(0.0), positive, negative, config)
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_clipped_token_has_no_gradient_and_is_counted():
    new = torch.tensor([0.0, math.log(1.5), math.log(0.5), math.log(9.0)], dtype=torch.float64, requires_grad=True)
    positive, negative = tensor(1, 1, 0, 0), tensor(-1, 0, -1, -1)
    loss, stats = ppo(new, tensor(0, 0, 0, 0), positive, negative, DUAL)
    loss.backward()
    assert new.grad.tolist() == [0.0, 0.0, 0.0, 0.0]  # the first token's two signs cancel at ratio 1
    summary = summed(stats)
    assert (summary.clip_high_share, summary.clip_low_share, summary.clip_dual_share) == (0.25, 0.25, 0.25)
    assert summary.tokens == 4
    assert summary.ratio_max == pytest.approx(9.0)


def test_infinite_ratio_gives_no_nan():
    new = torch.tensor([1000.0, -1000.0], requires_grad=True)
    config = AlgorithmConfig(kl_coefficient=0.1, dual_clip=None)
    loss, stats = ppo(new, torch.zeros(2), torch.ones(2), -torch.ones(2), config, reference=torch.zeros(2))
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all() and stats.sums.isfinite().all()


@given(
    tokens=st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(0, 2)), min_size=1, max_size=6),
    coefficient=st.floats(0.01, 1),
)
def test_kl_penalty_is_k3_and_pulls_towards_the_reference(tokens, coefficient):
    new, reference, weight = (tensor(*column) for column in zip(*tokens, strict=True))
    new.requires_grad_()
    zeros, config = torch.zeros_like(weight), AlgorithmConfig(kl_coefficient=coefficient)
    loss, stats = ppo(new, new.detach(), zeros, zeros, config, weight=weight, reference=reference)
    loss.backward()
    expected = sum(coefficient * w * (math.exp(r - n) - (r - n) - 1) for n, r, w in tokens)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert summed(stats).loss_kl == pytest.approx(expected, rel=1e-9, abs=1e-12)
    slopes = [coefficient * w * (1 - math.exp(r - n)) for n, r, w in tokens]
    torch.testing.assert_close(new.grad, tensor(*slopes), rtol=1e-9, atol=1e-12)


def test_entropy_bonus_is_the_weighted_entropy():
    new, entropies = tensor(-1, -2).requires_grad_(), tensor(0.5, 1.5).requires_grad_()
    zeros, config = torch.zeros(2, dtype=torch.float64), AlgorithmConfig(entropy_coefficient=0.1)
    loss, stats = ppo(new, new.detach(), zeros, zeros, config, weight=tensor(1, 2), entropies=entropies)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.35)
    assert entropies.grad.tolist() == pytest.approx([-0.1, -0.2])
    assert summed(stats).loss_entropy == pytest.approx(0.35) and summed(stats).entropy_mean == pytest.approx(1.0)


def test_on_policy_statistics_are_exact():
    logprobs = torch.randn(5)
    _, stats = ppo(logprobs, logprobs.clone(), torch.ones(5), torch.zeros(5))
    summary = summed(stats)
    assert (summary.ratio_mean, summary.ratio_max, summary.kl_old, summary.clip_high_share) == (1.0, 1.0, 0.0, 0.0)


def test_pack_without_targets_has_no_loss():
    empty = torch.zeros(0, requires_grad=True)
    for loss, stats in (ppo(empty, empty, empty, empty), linear_loss(empty, empty, empty)):
        summary = summed(stats)
        assert float(loss) == 0 and summary.tokens == 0 and summary.ratio_max == 0 and summary.ratio_p50 == 1.0


def test_linear_loss_weights_log_probs():
    loss, stats = linear_loss(tensor(-1.0, -2.0), tensor(0, 0), tensor(0.25, 0.5))
    assert float(loss) == 1.25 and summed(stats).tokens == 2


def test_statistics_of_packs_add_up():
    log_ratios = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    packs = [ppo(part, torch.zeros_like(part), part * 0, part * 0)[1] for part in log_ratios.split(300)]
    summary = summed(*packs)
    bin_width = 2 * HISTOGRAM_BOUND / HISTOGRAM_BINS
    for share, found in ((0.01, summary.ratio_p01), (0.5, summary.ratio_p50), (0.99, summary.ratio_p99)):
        assert abs(math.log(found) - (2 * share - 1)) <= bin_width
    assert summary.tokens == 1001 and ratio_quantile(torch.zeros(HISTOGRAM_BINS).numpy(), 0.5) == 1.0


@pytest.mark.parametrize("ulps", [-1024, -4, -1, 1, 4, 1024])
def test_kl_old_resolves_ratios_off_by_rounding(ulps: int) -> None:
    """`consistency.check_on_policy` takes kl_old == 0 to mean that every ratio is exactly 1."""
    old = torch.full((5,), -0.75)
    new = old.clone()
    new[2] += ulps * 2.0**-24
    ones = torch.ones(5)
    for logprobs, same in ((old, True), (new, False)):
        _, stats = policy_loss(Ppo(0.2, 0.2, None), logprobs, ones, old, ones, -ones, ones, AlgorithmConfig())
        assert (UpdateStats.of(stats.sums, stats.ratio_max, grad_norm=0.0, lr=0.0, skipped=False).kl_old == 0.0) is same
