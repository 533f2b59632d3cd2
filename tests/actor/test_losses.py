"""The loss of a shared token, against PPO-clip written out copy by copy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.actor.losses import nll_loss, tree_ppo_loss

finite = st.floats(-3, 3)
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None)
@given(
    log_ratio=finite,
    copies=st.lists(st.tuples(st.floats(0.01, 1), finite), min_size=1, max_size=5),
    clip_low=st.floats(0, 0.9),
    clip_high=st.floats(0, 2),
    dual_clip=st.none() | st.floats(1.01, 5),
)
def test_one_term_equals_the_sum_over_the_copies(log_ratio, copies, clip_low, clip_high, dual_clip):
    ratio, expected = math.exp(log_ratio), 0.0
    for weight, advantage in copies:
        objective = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            objective = max(objective, dual_clip * advantage)
        expected -= weight * objective
    positive = tensor(sum(w * max(a, 0) for w, a in copies))
    negative = tensor(sum(w * min(a, 0) for w, a in copies))
    loss, _ = tree_ppo_loss(
        tensor(log_ratio), tensor(0.0), positive, negative, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_clipped_token_has_no_gradient_and_is_counted():
    new = torch.tensor([0.0, math.log(1.5), math.log(0.5), math.log(9.0)], dtype=torch.float64, requires_grad=True)
    positive, negative = tensor(1, 1, 0, 0), tensor(-1, 0, -1, -1)
    loss, stats = tree_ppo_loss(new, tensor(0, 0, 0, 0), positive, negative, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    loss.backward()
    assert new.grad.tolist() == [0.0, 0.0, 0.0, 0.0]  # the first token's two signs cancel at ratio 1
    assert (int(stats.clipped), int(stats.tokens)) == (3, 4)
    assert float(stats.ratio_max) == pytest.approx(9.0)


def test_an_infinite_ratio_gives_no_nan():
    new = torch.tensor([1000.0, -1000.0], requires_grad=True)
    loss, stats = tree_ppo_loss(new, torch.zeros(2), torch.ones(2), -torch.ones(2), **CLIP)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all() and stats.kl_k3.isfinite()


def test_on_policy_statistics_are_exact():
    logprobs = torch.randn(5)
    _, stats = tree_ppo_loss(logprobs, logprobs.clone(), torch.ones(5), torch.zeros(5), **CLIP)
    assert (float(stats.ratio), float(stats.ratio_max), float(stats.kl_k3), int(stats.clipped)) == (5.0, 1.0, 0.0, 0)


def test_no_tokens_have_no_loss():
    empty = torch.zeros(0, requires_grad=True)
    for loss, stats in (tree_ppo_loss(empty, empty, empty, empty, **CLIP), nll_loss(empty, empty)):
        assert float(loss) == 0 and stats.sums().tolist() == [0.0] * 5 and float(stats.ratio_max) == 0


def test_negative_log_likelihood_is_weighted():
    loss, stats = nll_loss(tensor(-1.0, -2.0), tensor(0.25, 0.5))
    assert float(loss) == 1.25 and int(stats.tokens) == 2
