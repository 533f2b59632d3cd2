"""Losses on a tree equal those of flattened trajectories (flat.py), gradient included, also at extreme ratios."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.base import BatchLoss, LossTokens, TrainingProgress
from arpo_megatron.algorithms.credit import tree_credits
from arpo_megatron.algorithms.losses.aepo import Aepo
from arpo_megatron.algorithms.losses.bapo import Bapo
from arpo_megatron.algorithms.losses.cispo import Cispo
from arpo_megatron.algorithms.losses.epo import Epo
from arpo_megatron.algorithms.losses.gspo import Gspo
from arpo_megatron.algorithms.losses.hapo import Hapo
from arpo_megatron.algorithms.losses.hispo import Hispo
from arpo_megatron.algorithms.losses.mdpo import Mdpo
from arpo_megatron.algorithms.losses.ppo import Ppo
from arpo_megatron.tree import Role, RolloutTree
from tests.algorithms import flat

LOW, HIGH = 0.2, 0.3


def ppo(dual: float | None):
    def term(_new, ratio, _entropies, advantage):
        value = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        return value if dual is None or advantage >= 0 else value.clamp(min=dual * advantage)

    return term


def cispo(new, ratio, _entropies, advantage):
    return ratio.detach().clamp(0.0, 1 + HIGH) * advantage * new


def aepo(_new, ratio, _entropies, advantage):
    """Factor F of arXiv 2510.14545: bounded value, rescaled gradient."""
    kept = torch.where(ratio > 1 + HIGH, (1 + HIGH) / ratio.detach() * ratio, ratio)
    return (kept if advantage >= 0 else ratio.clamp(min=1 - LOW)) * advantage


@given(case=flat.cases())
def test_mdpo_adds_the_distance_of_every_copy(case: flat.Case) -> None:
    """Its divergence does not depend on advantages, so the reference uses the weights alone."""
    exact = flat.flat_loss(case, lambda _new, ratio, _entropies, advantage: ratio * advantage)
    exact = exact + flat.flat_weights(case, lambda ratio: (ratio * ratio.log() - ratio + 1) / 2.5)
    flat.assert_same(case, Mdpo(2.5), exact)


@given(case=flat.cases(), past=st.sampled_from([None, 0.5, 1.5]), step=st.integers(0, 9))
def test_epo_holds_the_entropy_of_every_copy_in_a_corridor_of_its_past(
    case: flat.Case, past: float | None, step: int
) -> None:
    """Checks the value and the gradient with respect to entropies; PPO's part has its own test."""
    batch, loss = case.batch, Epo(LOW, HIGH, 3.0, 0.1, 0.5, 0.8, 1.2, 2.0)
    entropies = [entropy.clone().requires_grad_() for entropy in case.entropies]
    exact = torch.zeros((), dtype=torch.float64)
    for number, tree in enumerate(batch.trees):
        for row, leaf in enumerate(tree.leaves()):
            for h in entropies[number][flat.places(tree, leaf)]:
                band = 0.0 if past is None else torch.relu(0.8 * past - h) + torch.relu(h - 1.2 * past)
                smooth = (1 + np.exp(-2.0 * step / 4)) * 0.5 * band  # floor(9 / 2) is the middle
                exact = exact - 0.1 * batch.weights[number][row] * (h - smooth)
    found = torch.zeros((), dtype=torch.float64)
    credits = tree_credits(
        batch.trees, batch.advantages, aggregation=case.aggregation, trajectory_weights=batch.trajectory_weights
    )
    for entropy, credit in zip(entropies, credits, strict=True):
        weight, ones = torch.from_numpy(credit.weight.astype(np.float64)), torch.ones_like(entropy)
        tokens = LossTokens(ones, ones, entropy, 0 * ones, 0 * ones, weight, TrainingProgress(step, 9, past))
        factors = loss.factors(tokens)
        assert factors.penalty is not None and bool((factors.gain == 1).all())
        found = found + (weight * factors.penalty).sum()
    assert float(found.detach()) == pytest.approx(float(exact.detach()), rel=1e-5, abs=1e-9)
    if exact.requires_grad:
        slopes = (torch.autograd.grad(value, entropies, materialize_grads=True) for value in (found, exact))
        for own, other in zip(*slopes, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-9)


def flat_bounds(case: flat.Case, loss: Bapo) -> tuple[float, float]:
    """Search the bounds over all copies of all tokens."""
    copies = [
        (batch.weights[number][row], advantage, ratio)
        for batch in [case.batch]
        for number, tree in enumerate(batch.trees)
        for row, leaf in enumerate(tree.leaves())
        for spots in [flat.places(tree, leaf)]
        for advantage, ratio in zip(
            flat.advantage_at(batch, number, row, spots),
            np.exp(np.clip(batch.logprobs[number] - batch.old_logprobs[number], -20, 20))[spots],
            strict=True,
        )
    ]
    low, high = loss.low_start, loss.high_start
    while True:
        gain = sum(w * a * min(r, high) for w, a, r in copies if a > 0)
        cost = sum(-w * a * max(r, low) for w, a, r in copies if a < 0)
        if gain >= loss.positive_share * (gain + cost) or (low >= loss.low_end and high >= loss.high_end):
            return low, high
        if low < loss.low_end:
            low = min(low + loss.low_step, loss.low_end)
        else:
            high = min(high + loss.high_step, loss.high_end)


@given(case=flat.cases())
def test_bapo_is_ppo_with_the_bounds_that_balance_the_copies(case: flat.Case) -> None:
    loss = Bapo(dual_clip=3.0)
    low, high = flat_bounds(case, loss)

    def term(_new, ratio, _entropies, advantage):
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        return value if advantage >= 0 else value.clamp(min=3.0 * advantage)

    flat.assert_same(case, loss, flat.flat_loss(case, term))


def test_bapo_moves_the_lower_bound_first() -> None:
    loss, ones = Bapo(dual_clip=None), np.ones(2)
    even = np.array([1.0, 0.0]), np.array([0.0, -1.0])
    assert loss.bounds(*even, ones) == (0.6, 1.2)  # on policy both sides have equal weight
    assert loss.bounds(np.array([0.5, 0.0]), even[1], ones) == pytest.approx((0.9, 3.0))
    found = loss.bounds(np.array([1.0, 0.0]), np.array([0.0, -1.0]), np.array([2.0, 1.3]))
    assert found == pytest.approx((0.9, 1.3), abs=0.051)


TOKEN_LOSSES = {
    "aepo": (Aepo(LOW, HIGH, None), aepo),
    "ppo": (Ppo(LOW, HIGH, None), ppo(None)),
    "ppo, dual clip": (Ppo(LOW, HIGH, 3.0), ppo(3.0)),
    "cispo": (Cispo(1.0, HIGH), cispo),
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@given(case=flat.cases())
def test_token_losses_equal_those_of_flattened_trajectories(name: str, case: flat.Case) -> None:
    loss, term = TOKEN_LOSSES[name]
    flat.assert_same(case, loss, flat.flat_loss(case, term))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(max_examples=15)
@given(case=flat.cases(), seed=st.integers(0, 99))
def test_token_factors_may_swap_the_signs_of_advantages(name: str, case: flat.Case, seed: int) -> None:
    loss, term = TOKEN_LOSSES[name]
    scale = [np.random.default_rng(seed).normal(0.5, 1, tree.unique_tokens) for tree in case.batch.trees]
    flat.assert_same(case, loss, flat.flat_loss(case, term, scale), scale)


def assert_slope(case: flat.Case, found: list[torch.Tensor], value: Callable[[flat.Case], float]) -> None:
    """Compare with finite differences of `value` at every token that is not at a kink."""
    step = 1e-5
    for number, (own, old) in enumerate(zip(found, case.batch.old_logprobs, strict=True)):
        for token in np.flatnonzero(~np.isnan(old))[:4]:
            outer, inner = (
                (value(shifted(case, number, token, width)) - value(shifted(case, number, token, -width))) / (2 * width)
                for width in (2 * step, step)
            )
            if abs(outer - inner) <= 1e-4 * max(1.0, abs(outer)):  # else a kink lies between
                assert abs(float(own[token]) - inner) <= 1e-3 * max(1.0, abs(inner))


def shifted(case: flat.Case, number: int, token: int, width: float) -> flat.Case:
    """Return the batch with one log-prob of the policy in training moved."""
    move = np.zeros(len(case.batch.logprobs[number]))
    move[token] = width
    logprobs = [own + move if n == number else own for n, own in enumerate(case.batch.logprobs)]
    parameters = [own.detach().clone().requires_grad_() for own in case.parameters]
    with torch.no_grad():
        parameters[number][token] += width
    return replace(case, batch=replace(case.batch, logprobs=logprobs), parameters=parameters)


def within_limit(case: flat.Case) -> bool:
    """Whether no log-ratio is clamped: beyond the limit the value is constant, but batch losses keep a gradient."""
    return all(np.abs(np.nan_to_num(new - old)).max(initial=0.0) < 19 for new, old in new_and_old(case))


def value_of(loss: object) -> Callable[[flat.Case], float]:
    """Return the value of the loss on the tree."""
    return lambda case: flat.tree_loss(case, loss)[0]


SMOOTH = {
    "ppo": Ppo(LOW, HIGH, None),
    "ppo, dual clip": Ppo(LOW, HIGH, 3.0),
    "mdpo": Mdpo(2.5),
    "epo": Epo(LOW, HIGH, 3.0),
    "gspo": Gspo(LOW, HIGH),
    "hispo": Hispo(LOW, HIGH, 3.0),
}
"""Losses whose gradient is that of their value: nothing in them is held constant that moves with the policy."""


@pytest.mark.parametrize("name", SMOOTH)
@settings(max_examples=8)
@given(case=flat.cases(by_segment=False))
def test_loss_gradient_is_the_slope_of_the_loss(name: str, case: flat.Case) -> None:
    """GSPO-token (advantages by segment) stops the gradient of its ratio."""
    loss = SMOOTH[name]
    if isinstance(loss, BatchLoss):
        assume(within_limit(case))
    assert_slope(case, flat.tree_loss(case, loss)[1], value_of(loss))


@settings(max_examples=8)
@given(case=flat.cases())
def test_bapo_gradient_is_the_slope_between_its_bounds(case: flat.Case) -> None:
    """The bounds are held constant, because they move by steps."""
    assume(within_limit(case))
    loss = Bapo(dual_clip=3.0)
    low, high = flat_bounds(case, loss)
    held = replace(loss, low_start=low, low_end=low, high_start=high, high_end=high)
    assert_slope(case, flat.tree_loss(case, loss)[1], value_of(held))


@settings(max_examples=8)
@given(case=flat.cases())
def test_hapo_gradient_is_the_slope_if_no_advantage_jumps(case: flat.Case) -> None:
    """Value and slope jump if a ratio leaves the inner half of its bounds, so difference quotients do not converge
    there.
    """
    assume(within_limit(case))
    loss = Hapo(LOW, HIGH, 3.0)
    assert_slope(case, flat.tree_loss(case, loss)[1], value_of(loss))


@settings(max_examples=8)
@given(case=flat.cases())
def test_cispo_gradient_is_the_slope_with_constant_weights(case: flat.Case) -> None:
    """Checks sg(r) * A * logprob with the weights of the point where the gradient is taken."""
    weights = [np.exp(np.clip(new - old, -20, 20)).clip(0, 1 + HIGH) for new, old in new_and_old(case)]

    def surrogate(moved: flat.Case) -> float:
        total = 0.0
        for number, tree in enumerate(moved.batch.trees):
            for row, leaf in enumerate(tree.leaves()):
                spots = flat.places(tree, leaf)
                terms = weights[number] * moved.batch.logprobs[number]
                advantages = flat.advantage_at(moved.batch, number, row, spots)
                total -= moved.batch.weights[number][row] * float((terms[spots] * advantages).sum())
        return total

    assert_slope(case, flat.tree_loss(case, Cispo(1.0, HIGH))[1], surrogate)


def new_and_old(case: flat.Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return (new, old) log-probs, tree by tree."""
    return zip(case.batch.logprobs, case.batch.old_logprobs, strict=True)


def flat_gspo(case: flat.Case) -> torch.Tensor:
    """Compute GSPO trajectory by trajectory, with autograd through the ratios (stopped in GSPO-token)."""
    batch, total = case.batch, torch.zeros((), dtype=torch.float64)
    count = sum(len(tree.leaves()) for tree in batch.trees)
    for number, tree in enumerate(batch.trees):
        for row, leaf in enumerate(tree.leaves()):
            spots = flat.places(tree, leaf)
            weight, given = batch.trajectory_weights[number][row] / count, batch.advantages[number][row]
            if not len(spots):  # no tokens, no term
                continue
            new, old = case.parameters[number][spots], torch.from_numpy(batch.old_logprobs[number])[spots]
            mean = (new - old).mean()
            s = (mean + (mean.clamp(-20, 20) - mean).detach()).exp()  # a gradient beyond the bound too
            if given.ndim == 0:
                ratios, advantages = s[None], torch.tensor([float(given)], dtype=torch.float64)
            else:
                ratios = s.detach() * (new - new.detach()).exp()
                advantages = torch.from_numpy(flat.advantage_at(batch, number, row, spots))
            terms = torch.minimum(ratios * advantages, ratios.clamp(1 - LOW, 1 + HIGH) * advantages)
            total = total - weight * terms.mean()
    return total


@given(case=flat.cases())
def test_gspo_equals_that_of_flattened_trajectories(case: flat.Case) -> None:
    flat.assert_same(case, Gspo(LOW, HIGH), flat_gspo(case))


def test_gspo_stays_finite_at_extreme_ratios_and_counts_clipped_trajectories() -> None:
    tree = RolloutTree("t", [1])
    for _ in range(2):
        tree.add(0, Role.MODEL, [2, 3])
    ones, zeros = [np.ones(2)], [np.zeros(5)]
    batch = flat.LossBatch([tree], [np.array([1.0, -1.0])], ones, ones, zeros, zeros, zeros, zeros)
    found = Gspo(0.1, 0.1).value(replace(batch, logprobs=[np.array([0, 900, 900, -900, -900.0])]))
    assert np.isfinite(found.loss)
    assert found.statistics["clip_low_share"] == found.statistics["clip_high_share"] == 0.5
    assert not found.credits[0].positive.any() and not found.credits[0].negative.any()
    same = Gspo(0.1, 0.1).value(batch).statistics
    assert same["ratio_max"] == same["ratio_mean"] == 1.0
