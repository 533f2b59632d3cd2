"""Losses of whole batches with masks, entropies and chunks, against flattened float64 copies with autograd."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arpo_megatron.algorithms.base import BatchLoss
from arpo_megatron.algorithms.losses.clip_cov import ClipCov
from arpo_megatron.algorithms.losses.hapo import Hapo
from arpo_megatron.algorithms.losses.hispo import Hispo
from arpo_megatron.algorithms.losses.ipa import Ipa
from arpo_megatron.algorithms.losses.minirl import MiniRl
from arpo_megatron.algorithms.losses.mix_ppg import MixPpg
from arpo_megatron.tree import Role, RolloutTree
from tests.algorithms import flat
from tests.algorithms.test_methods_turns import flat_turns

LOW, HIGH, DUAL = 0.2, 0.3, 3.0


@dataclass(frozen=True)
class Copy:
    """One trajectory of the flattened batch: tensors of its model tokens."""

    number: int
    row: int
    spots: np.ndarray
    new: Tensor
    old: Tensor
    drawn: Tensor
    entropies: Tensor
    advantages: Tensor
    weight: float


def copies(case: flat.Case) -> Iterator[Copy]:
    batch = case.batch
    for number, tree in enumerate(batch.trees):
        for row, leaf in enumerate(tree.leaves()):
            spots = flat.places(tree, leaf)
            known = [torch.from_numpy(v[number])[spots] for v in (batch.old_logprobs, batch.sampling_logprobs)]
            yield Copy(
                number,
                row,
                spots,
                case.parameters[number][spots],
                *known,
                torch.from_numpy(batch.entropies[number])[spots],
                torch.from_numpy(flat.advantage_at(batch, number, row, spots)),
                batch.weights[number][row],
            )


def ppo(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float, dual: float | None) -> Tensor:
    value = torch.minimum(ratio * advantages, torch.clamp(ratio, min=low, max=high) * advantages)
    return value if dual is None else torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)


def total(case: flat.Case, term: Callable[[Copy], Tensor]) -> Tensor:
    every = [-copy.weight * term(copy).sum() for copy in copies(case)]
    return torch.stack([torch.zeros((), dtype=torch.float64), *every]).sum()


def limited(logs: Tensor) -> Tensor:
    return logs.clamp(-20, 20).exp()


def mismatched(case: flat.Case, spread: float, seed: int) -> flat.Case:
    """Return the case with an engine that differs more from the trainer."""
    rng = np.random.default_rng(seed)
    drawn = [old + rng.normal(0, spread, len(old)) for old in case.batch.old_logprobs]
    return replace(case, batch=replace(case.batch, sampling_logprobs=drawn))


spreads = st.sampled_from([0.01, 0.3, 2.0])


@given(case=flat.cases(), spread=spreads, seed=st.integers(0, 99))
def test_minirl_weighs_each_token_by_its_truncated_ratio_to_the_engine(case, spread, seed):
    case = mismatched(case, spread, seed)

    def term(copy: Copy) -> Tensor:
        ratio = limited(copy.new - copy.old).detach()
        weight = torch.clamp(ratio * limited(copy.old - copy.drawn), max=5.0)
        stopped = ((copy.advantages > 0) & (ratio > 1 + HIGH)) | ((copy.advantages < 0) & (ratio < 1 - LOW))
        return torch.where(stopped, 0.0, weight) * copy.advantages * copy.new

    flat.assert_same(case, MiniRl(LOW, HIGH), total(case, term))


@given(case=flat.cases(), spread=spreads, seed=st.integers(0, 99))
def test_mix_ppg_clips_the_ratio_to_the_sampling_policy_around_that_of_the_step(case, spread, seed):
    case = mismatched(case, spread, seed)

    def term(copy: Copy) -> Tensor:
        centre = limited(copy.old - copy.drawn)
        ratio = limited(copy.new - copy.old) * centre
        value = ppo(ratio, copy.advantages, centre - LOW, centre + HIGH, None)
        return torch.where(copy.advantages < 0, torch.maximum(value, DUAL * centre * copy.advantages), value)

    flat.assert_same(case, MixPpg(LOW, HIGH, DUAL), total(case, term))


@settings(max_examples=15)
@given(case=flat.cases())
def test_mix_ppg_is_ppo_if_the_policy_of_the_step_has_sampled(case):
    case = mismatched(case, 0.0, 0)
    exact = total(case, lambda copy: ppo(limited(copy.new - copy.old), copy.advantages, 1 - LOW, 1 + HIGH, DUAL))
    flat.assert_same(case, MixPpg(LOW, HIGH, DUAL), exact)


@given(case=flat.cases(), spread=spreads, seed=st.integers(0, 99))
def test_hispo_leaves_out_trajectories_and_tokens_of_another_engine(case, spread, seed):
    case = mismatched(case, spread, seed)
    lost = whole = 0.0

    def term(copy: Copy) -> Tensor:
        nonlocal lost, whole
        apart = copy.old - copy.drawn
        far = bool((apart.mean().exp() - 1).abs() >= 0.2) if len(apart) else False
        keep = ((apart.exp() - 1).abs() < 0.25) & torch.tensor(not far)
        whole += copy.weight * float(copy.advantages.abs().sum())
        lost += copy.weight * float(copy.advantages.abs()[~keep].sum())
        ratio = limited(copy.new - copy.old) * limited(apart)
        return torch.where(keep, ppo(ratio, copy.advantages, 1 - LOW, 1 + HIGH, DUAL), 0.0)

    loss = Hispo(LOW, HIGH, DUAL, hispo_sequence=0.2, hispo_token=0.25)
    flat.assert_same(case, loss, total(case, term))
    assert loss.value(case.batch).statistics["masked_share"] == pytest.approx(lost / whole if whole else 0, abs=1e-5)


@given(case=flat.cases(), pivot=st.sampled_from([0.0, 0.5, 0.8, 1.0]), size=st.sampled_from([0.0, 0.5, 1.0]))
def test_hapo_moves_bounds_and_advantages_with_the_entropy_of_all_copies(case, pivot, size):
    every = np.concatenate([np.zeros(0), *(copy.entropies.numpy() for copy in copies(case))])
    logs = np.log(np.maximum(every, 1e-8))
    centre = np.quantile(logs, pivot, method="nearest") if len(logs) else 0.0
    # As in the authors' code, standard deviation included.
    std = max(float(((logs - centre) ** 2).mean()) if len(logs) else 1.0, 1e-16) ** 0.5
    most, least = max(((logs - centre) / std).max(initial=0), 1e-8), min(((logs - centre) / std).min(initial=0), -1e-8)

    def term(copy: Copy) -> Tensor:
        h = (torch.log(copy.entropies.clamp(min=1e-8)) - centre) / std
        h = torch.where(h > 0, h / most, h / -least)
        high = 1 + HIGH * torch.where(h > 0, 1 + size * h, 1.0)
        low = 1 - LOW * torch.where(h <= 0, 1 - size * h, 1.0)
        ratio = limited(copy.new - copy.old)
        neutral = (ratio > 1 - (1 - low) / 2) & (ratio < 1 + (high - 1) / 2)
        moved = torch.where(h > 0, ~neutral, neutral)
        return ppo(ratio, torch.where(moved, 1 + size * h, 1.0) * copy.advantages, low, high, DUAL)

    flat.assert_same(case, Hapo(LOW, HIGH, DUAL, pivot, size, size), total(case, term))


@given(case=flat.cases(), spread=spreads, seed=st.integers(0, 99))
def test_ipa_imitates_good_chunks_and_weighs_bad_ones_by_their_ratio(case, spread, seed):
    case = mismatched(case, spread, seed)

    def term(copy: Copy) -> Tensor:
        tree = case.batch.trees[copy.number]
        factor = torch.zeros(len(copy.spots), dtype=torch.float64)
        for _, places in flat_turns(tree, tree.leaves()[copy.row]):
            own = torch.from_numpy(np.isin(copy.spots, places))
            rho = limited((copy.new - copy.old)[own].mean()).detach().clamp(max=1.0)
            close = bool(limited((copy.old - copy.drawn)[own].mean()) <= 1.1)
            factor[own] = torch.where(copy.advantages[own] > 0, 1.0, rho) * float(close)
        return factor * copy.advantages * copy.new

    flat.assert_same(case, Ipa(1.1), total(case, term))


@given(case=flat.cases(), share=st.sampled_from([0.001, 0.1, 1.0]))
def test_clip_cov_masks_the_set_share_of_candidates(case, share):
    """With a share of 1 every candidate is masked; otherwise only their number and kind are known."""
    loss = ClipCov(LOW, HIGH, share, covariance_low=0.02, covariance_high=0.2)
    every = list(copies(case))
    tokens = sum(len(copy.spots) for copy in every)
    advantages = torch.cat([torch.zeros(0, dtype=torch.float64), *(copy.advantages for copy in every)])
    logprobs = torch.cat([torch.zeros(0, dtype=torch.float64), *(copy.new.detach() for copy in every)])

    def near(copy: Copy) -> Tensor:
        covariance = (copy.advantages - advantages.mean()) * (copy.new.detach() - logprobs.mean())
        ratio = limited(copy.new - copy.old)
        kept = ppo(ratio, copy.advantages, 1 - LOW, 1 + HIGH, None) == ratio * copy.advantages
        return (covariance > 0.02) & (covariance < 0.2) & kept

    allowed = sum(int(near(copy).sum()) for copy in every)
    found = loss.value(case.batch)
    sizes = sorted(copy.weight * abs(float(a)) for copy in every for a in copy.advantages[near(copy)])
    whole = sum(copy.weight * float(copy.advantages.abs().sum()) for copy in every)
    lost = found.statistics.get("masked_share", 0.0) * whole
    count = min(allowed, max(1, int(share * tokens)))
    assert sum(sizes[:count]) - 1e-5 <= lost <= sum(sizes[allowed - count :]) + 1e-5
    if count == allowed:
        exact = total(
            case,
            lambda copy: torch.where(
                near(copy), 0.0, ppo(limited(copy.new - copy.old), copy.advantages, 1 - LOW, 1 + HIGH, None)
            ),
        )
        if all(
            (copy.new - copy.old).detach().abs().lt(20).all() for copy in every
        ):  # torch's clamp has no gradient there
            flat.assert_same(case, loss, exact)


LOSSES = [
    MiniRl(LOW, HIGH),
    MixPpg(LOW, HIGH, DUAL),
    Hispo(LOW, HIGH, DUAL),
    Hapo(LOW, HIGH, DUAL),
    Ipa(),
    ClipCov(LOW, HIGH),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_batch_losses_stay_finite_and_accept_an_empty_batch(loss: BatchLoss) -> None:
    tree = RolloutTree("t", [1])
    for _ in range(2):
        tree.add(0, Role.MODEL, [2, 3])
    tree.add(0, Role.TOOL, [])
    nan, weights = np.full(5, np.nan), [np.ones(3)]
    new = np.array([np.nan, 900, 900, -900, -900.0])
    batch = flat.LossBatch([tree], [np.array([1.0, -1.0, 0.5])], weights, weights, [0 * new], [new], [nan], [nan])
    found = loss.value(batch)
    assert np.isfinite(found.loss)
    assert all(np.isfinite(part).all() for c in found.credits for part in (c.positive, c.negative, c.weight))
    empty = loss.value(flat.LossBatch([], [], [], [], [], [], [], []))
    assert empty.credits == [] and empty.loss == 0.0
