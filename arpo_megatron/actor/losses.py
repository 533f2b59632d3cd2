"""Losses of a pack: sums over its target tokens, already weighted, so packs add up to the minibatch's loss."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this in both directions: an infinite ratio that is clipped away has gradient 0 * inf."""


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Sums over target tokens (a maximum for `ratio_max`), detached scalars, on the device of the log-probs.

    Attributes:
        loss: the loss itself.
        tokens: number of target tokens.
        clipped: tokens whose gradient the clipping removed, wholly or from one sign of advantage.
        ratio: sum of new over old probability.
        ratio_max: its maximum, 0 without tokens.
        kl_k3: sum of ratio - 1 - log ratio, the k3 estimator of KL(old || new) in nats.
    """

    loss: Tensor
    tokens: Tensor
    clipped: Tensor
    ratio: Tensor
    ratio_max: Tensor
    kl_k3: Tensor

    def sums(self) -> Tensor:
        """float64[fields - 1]: all that add up over packs, in the order of the fields without `ratio_max`."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self) if f.name != "ratio_max"])


def tree_ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, PolicyStats]:
    """PPO-clip of a tree: one term a shared token that equals the sum over all its flattened copies.

    With ratio r, pos = sum_i w_i max(A_i, 0) and neg = sum_i w_i min(A_i, 0) over the leaves i below a token:
    L = -(pos * min(r, 1 + clip_high) + neg * max(r, 1 - clip_low)), and with dual clip (arXiv 1912.09729)
    neg * min(max(r, 1 - clip_low), dual_clip).

    Args:
        logprobs: float[m] of the policy in training, in nats.
        old_logprobs: float[m] of the policy before the step's first update.
        positive: float[m], at least 0.
        negative: float[m], at most 0.
        clip_low: below 1 - clip_low a ratio gives negative advantages no gradient.
        clip_high: above 1 + clip_high a ratio gives positive advantages no gradient.
        dual_clip: bound of the ratio for negative advantages, above 1; None: no bound.

    Returns:
        the sum of L over the tokens, and its statistics.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    gained = positive * ratio.clamp(max=1 + clip_high)
    lost = negative * ratio.clamp(min=1 - clip_low, max=dual_clip)
    loss = -(gained + lost).sum()
    with torch.no_grad():
        out_low = ratio < 1 - clip_low
        if dual_clip is not None:
            out_low |= ratio > dual_clip
        clipped = ((positive > 0) & (ratio > 1 + clip_high)) | ((negative < 0) & out_low)
        stats = PolicyStats(
            loss=loss.detach(),
            tokens=torch.tensor(ratio.numel(), device=ratio.device),
            clipped=clipped.sum(),
            ratio=ratio.sum(),
            ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()),
            kl_k3=(ratio - 1 - log_ratio).sum(),
        )
    return loss, stats


def nll_loss(logprobs: Tensor, weight: Tensor) -> tuple[Tensor, PolicyStats]:
    """Negative log-likelihood -sum(weight * logprob), for supervised training; the ratio is 1 by definition.

    Args:
        logprobs: float[m] in nats.
        weight: float[m].
    """
    loss = -(weight * logprobs).sum()
    tokens = torch.tensor(logprobs.numel(), device=logprobs.device)
    none = torch.zeros((), device=logprobs.device)
    return loss, PolicyStats(loss.detach(), tokens, none, tokens, tokens.clamp(max=1), none)
