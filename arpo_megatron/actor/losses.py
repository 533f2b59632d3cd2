"""Losses of a pack: weighted sums over its target tokens, so that packs add up to the batch's loss."""

import torch
from torch import Tensor

from arpo_megatron.actor.update_stats import PolicyStats
from arpo_megatron.algorithms.base import LossTokens, TokenLoss, TrainingProgress
from arpo_megatron.algorithms.importance import MAX_LOG_RATIO
from arpo_megatron.config import AlgorithmConfig


def policy_loss(
    loss: TokenLoss,
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    positive: Tensor,
    negative: Tensor,
    weight: Tensor,
    config: AlgorithmConfig,
    reference_logprobs: Tensor | None = None,
    progress: TrainingProgress | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Compute a token-level loss on a tree; a shared token has one term that equals the sum over its flattened copies.

    With pos = sum_i w_i max(A_i, 0) and neg = sum_i w_i min(A_i, 0) over the leaves i below a token,
    L = -(pos * gain + neg * cost), with gain and cost from the algorithm. The KL penalty and the entropy bonus do not
    depend on advantages and need only sum_i w_i (see `_regularisers`).

    Args:
        loss: the algorithm's loss.
        logprobs: float[m] of the policy in training, in nats.
        entropies: float[m] of the same distributions, in nats.
        old_logprobs: float[m] of the policy before the step's first update, in nats.
        positive: float[m], pos of each token, at least 0.
        negative: float[m], neg of each token, at most 0.
        weight: float[m], sum_i w_i of each token.
        config: coefficients of penalty and bonus.
        reference_logprobs: float[m] in nats, needed with a `kl_coefficient`.
        progress: position in the run, for losses that depend on it; None is its start.

    Returns:
        The sum of the terms over the tokens, and its statistics.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    factors = loss.factors(
        LossTokens(logprobs, ratio, entropies, positive, negative, weight, progress or TrainingProgress())
    )
    policy = -(positive * factors.gain + negative * factors.cost).sum()
    if factors.penalty is not None:
        policy = policy + (weight * factors.penalty).sum()
    penalty, bonus = _regularisers(logprobs, entropies, weight, config, reference_logprobs)
    total = policy + penalty - bonus
    with torch.no_grad():
        stats = PolicyStats.of(
            loss=total,
            policy=policy,
            penalty=penalty,
            bonus=bonus,
            clipped_high=_count(factors.clipped_high, positive > 0),
            clipped_low=_count(factors.clipped_low, negative < 0),
            clipped_dual=_count(factors.clipped_dual, negative < 0),
            ratio=ratio,
            log_ratio=log_ratio,
            kl_old=_k3(-log_ratio).sum(),
            kl_reference=None if reference_logprobs is None else _k3(logprobs - reference_logprobs).sum(),
            entropies=entropies,
        )
    return total, stats


def linear_loss(
    logprobs: Tensor,
    entropies: Tensor,
    coefficient: Tensor,
    old_logprobs: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    config: AlgorithmConfig | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Compute -sum(coefficient * logprob), for supervised training and for losses of whole batches.

    Args:
        logprobs: float[m] in nats.
        entropies: float[m] in nats.
        coefficient: float[m].
        old_logprobs: float[m] in nats, for the statistics only; None without an older policy.
        weight: float[m], sum_i w_i of each token for penalty and bonus.
        config: coefficients of penalty and bonus; None adds neither.
        reference_logprobs: float[m] in nats.
    """
    policy = -(coefficient * logprobs).sum()
    penalty = bonus = policy.new_zeros(())
    if config is not None and weight is not None:
        penalty, bonus = _regularisers(logprobs, entropies, weight, config, reference_logprobs)
    total = policy + penalty - bonus
    now = logprobs.detach()
    log_ratio = torch.zeros_like(now) if old_logprobs is None else now - old_logprobs
    stats = PolicyStats.of(
        loss=total,
        policy=policy,
        penalty=penalty,
        bonus=bonus,
        ratio=torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        log_ratio=log_ratio,
        kl_old=_k3(-log_ratio).sum(),
        kl_reference=None if reference_logprobs is None else _k3(now - reference_logprobs).sum(),
        entropies=entropies,
    )
    return total, stats


def _regularisers(
    logprobs: Tensor, entropies: Tensor, weight: Tensor, config: AlgorithmConfig, reference_logprobs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the KL penalty and the entropy bonus, summed over tokens.

    The penalty of a token is weight * kl_coefficient * (exp(d) - 1 - d) with d = reference - new log-prob (k3, arXiv
    2402.03300 eq. 4); the bonus is weight * entropy_coefficient * entropy.
    """
    penalty = bonus = logprobs.new_zeros(())
    if config.kl_coefficient and reference_logprobs is not None:
        penalty = config.kl_coefficient * (weight * _k3(logprobs - reference_logprobs)).sum()
    if config.entropy_coefficient:
        bonus = config.entropy_coefficient * (weight * entropies).sum()
    return penalty, bonus


def _k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-x) - 1 + x for the log-ratio x = log(p / q): an estimate of KL(p || q) from samples of p.

    It is never negative and 0 only for x = 0. It is computed in float64: float32 rounds away every x below 1e-4.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
    return (torch.expm1(-bounded) + bounded).to(log_ratio.dtype)


def _count(cut: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return how many of the tokens are cut; None for a loss without this bound."""
    return None if cut is None else (cut & tokens).sum()
