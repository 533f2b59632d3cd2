"""Losses of a pack: sums over its target tokens, already weighted, so packs add up to the minibatch's loss."""

import torch
from torch import Tensor

from arpo_megatron.actor.statistics import PolicyStats
from arpo_megatron.algorithms.sequence_ratio import MAX_LOG_RATIO
from arpo_megatron.config import AlgorithmConfig


def tree_ppo_loss(
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    positive: Tensor,
    negative: Tensor,
    weight: Tensor,
    config: AlgorithmConfig,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """PPO-clip of a tree: one term a shared token that equals the sum over all its flattened copies.

    With ratio r, pos = sum_i w_i max(A_i, 0) and neg = sum_i w_i min(A_i, 0) over the leaves i below a token:
    L = -(pos * min(r, 1 + clip_high) + neg * max(r, 1 - clip_low)), and with dual clip (arXiv 1912.09729)
    neg * min(max(r, 1 - clip_low), dual_clip). Penalty and bonus do not know of advantages, so sum_i w_i is enough:
    weight * kl_coefficient * (exp(d) - 1 - d) with d = reference - new log-prob (k3, arXiv 2402.03300 eq. 4), and
    -weight * entropy_coefficient * entropy.

    Args:
        logprobs: float[m] of the policy in training, in nats.
        entropies: float[m] of the same distributions, in nats.
        old_logprobs: float[m] of the policy before the step's first update.
        positive: float[m], at least 0.
        negative: float[m], at most 0.
        weight: float[m].
        config: clipping and coefficients.
        reference_logprobs: float[m], needed with a kl_coefficient.

    Returns:
        the sum of the terms over the tokens, and its statistics.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    policy = -(positive * ratio.clamp(max=high) + negative * ratio.clamp(min=low, max=config.dual_clip)).sum()
    penalty = policy.new_zeros(())
    if config.kl_coefficient and reference_logprobs is not None:
        penalty = config.kl_coefficient * (weight * _k3(logprobs - reference_logprobs)).sum()
    bonus = policy.new_zeros(())
    if config.entropy_coefficient:
        bonus = config.entropy_coefficient * (weight * entropies).sum()
    loss = policy + penalty - bonus
    with torch.no_grad():
        clipped_dual = negative < 0
        clipped_dual &= ratio > (torch.inf if config.dual_clip is None else config.dual_clip)
        stats = PolicyStats.of(
            loss=loss,
            policy=policy,
            penalty=penalty,
            bonus=bonus,
            clipped_high=((positive > 0) & (ratio > high)).sum(),
            clipped_low=((negative < 0) & (ratio < low)).sum(),
            clipped_dual=clipped_dual.sum(),
            ratio=ratio,
            log_ratio=log_ratio,
            kl_old=_k3(-log_ratio).sum(),
            kl_reference=None if reference_logprobs is None else _k3(logprobs - reference_logprobs).sum(),
            entropies=entropies,
        )
    return loss, stats


def linear_loss(
    logprobs: Tensor, entropies: Tensor, coefficient: Tensor, old_logprobs: Tensor | None = None
) -> tuple[Tensor, PolicyStats]:
    """-sum(coefficient * logprob): supervised training, and sequence-level losses (see algorithms/sequence_ratio.py).

    Args:
        logprobs: float[m] in nats.
        entropies: float[m] in nats.
        coefficient: float[m].
        old_logprobs: float[m] in nats, for the statistics alone; None where there is no older policy.
    """
    loss = -(coefficient * logprobs).sum()
    now = logprobs.detach()
    log_ratio = torch.zeros_like(now) if old_logprobs is None else now - old_logprobs
    stats = PolicyStats.of(
        loss=loss,
        policy=loss,
        ratio=torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        log_ratio=log_ratio,
        kl_old=_k3(-log_ratio).sum(),
        entropies=entropies,
    )
    return loss, stats


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x for the log-ratio x = log(p / q): an estimate of KL(p || q) from samples of p.

    Never negative, and 0 for x = 0 alone: in float64, for in float32 every x below 1e-4 would be lost in rounding.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
    return (torch.expm1(-bounded) + bounded).to(log_ratio.dtype)
