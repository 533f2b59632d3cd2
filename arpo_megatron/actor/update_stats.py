"""What an update says about itself: sums that packs and ranks add up, and the figures made of them."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

HISTOGRAM_BINS = 65
HISTOGRAM_BOUND = 4.0625
"""Log-ratios are counted in equal bins between -bound and bound nats; what lies outside counts in the last ones."""

_SUMS = (
    "loss",
    "policy",
    "penalty",
    "bonus",
    "tokens",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "ratio",
    "kl_old",
    "kl_reference",
    "entropy",
)


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Of one pack.

    Attributes:
        sums: float64[sums + bins], what adds up over packs: `_SUMS`, then the histogram of log-ratios.
        ratio_max: float64[], the largest ratio, 0 without tokens.
    """

    sums: Tensor
    ratio_max: Tensor

    @classmethod
    def of(cls, *, ratio: Tensor, log_ratio: Tensor, entropies: Tensor, **sums: Tensor | None) -> Self:
        """From token values and sums; a sum that is not given is 0."""
        values = {
            "tokens": torch.tensor(ratio.numel()),
            "ratio": ratio.detach().sum(),
            "entropy": entropies.detach().sum(),
            **{name: value for name, value in sums.items() if value is not None},
        }
        row = [values[name].detach().double().to(ratio.device) if name in values else _zero(ratio) for name in _SUMS]
        histogram = torch.histc(
            log_ratio.detach().double().clamp(-HISTOGRAM_BOUND, HISTOGRAM_BOUND).cpu(),
            HISTOGRAM_BINS,
            -HISTOGRAM_BOUND,
            HISTOGRAM_BOUND,
        ).to(ratio.device)
        largest = ratio.detach().max().double() if ratio.numel() else _zero(ratio)
        return cls(torch.cat([torch.stack(row), histogram]), largest)

    def row(self) -> Tensor:
        """float64[WIDTH]: the sums, then the maximum."""
        return torch.cat([self.sums, self.ratio_max[None]])


WIDTH = len(_SUMS) + HISTOGRAM_BINS + 1


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=like.device)


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer update. Means are over target tokens, a shared token counted once.

    Attributes:
        loss: of the whole minibatch.
        loss_policy: its policy (or supervised) part.
        loss_kl: its penalty for leaving the reference policy.
        loss_entropy: what the entropy bonus took off it.
        grad_norm: global norm before clipping.
        lr: learning rate of this update.
        clip_low_share: share of tokens whose negative gradient was clipped away below, in [0, 1].
        clip_high_share: likewise of the positive one above.
        clip_dual_share: likewise of the negative one above (dual clip).
        ratio_max: largest ratio of new to old probability.
        ratio_mean: its mean.
        ratio_p01: its quantiles, to a bin of the histogram (0.125 nats).
        ratio_p50: likewise.
        ratio_p99: likewise.
        entropy_mean: of the policy before the update, in nats.
        kl_old: k3 estimate of KL(old || new), mean, in nats.
        kl_reference: k3 estimate of KL(new || reference), mean, in nats.
        tokens: target tokens.
        skipped: loss or gradient was not finite, so weights and optimizer state are unchanged (the schedule goes on).
        masked_share: share of the minibatch's weighted advantages, by size, that masks of the loss have left out
            (`ipa`, `hispo`, `clip_cov`); None where the loss has none.
        weights_limited: share of trajectories whose importance weight met `algorithm.trajectory_weight_limit`, in
            [0, 1]; None without one.
        expert_busiest: load of the busiest expert of any layer over the mean, a shared token counted as often as it is
            shared; None without experts.
        expert_loss: what the router's balancing loss is without its coefficient, mean over layers; 1 is level.
        routes_replayed: share of tokens that went where the engine had sent them, in [0, 1]; None without experts.
        routes_differing: share of their experts that the trainer's routers would not have chosen; None likewise.
    """

    loss: float
    loss_policy: float
    loss_kl: float
    loss_entropy: float
    grad_norm: float
    lr: float
    clip_low_share: float
    clip_high_share: float
    clip_dual_share: float
    ratio_max: float
    ratio_mean: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    entropy_mean: float
    kl_old: float
    kl_reference: float
    tokens: int
    skipped: bool
    masked_share: float | None = None
    weights_limited: float | None = None
    expert_busiest: float | None = None
    expert_loss: float | None = None
    routes_replayed: float | None = None
    routes_differing: float | None = None

    @classmethod
    def of(cls, sums: Tensor, ratio_max: Tensor, **measured: Any) -> Self:
        """From the sums and the maximum over all packs; `measured` is what follows from neither."""
        values = dict(zip(_SUMS, sums[: len(_SUMS)].tolist(), strict=True))
        histogram = sums[len(_SUMS) :].cpu().numpy()
        count = max(1.0, values["tokens"])
        return cls(
            loss=values["loss"],
            loss_policy=values["policy"],
            loss_kl=values["penalty"],
            loss_entropy=values["bonus"],
            clip_low_share=values["clipped_low"] / count,
            clip_high_share=values["clipped_high"] / count,
            clip_dual_share=values["clipped_dual"] / count,
            ratio_max=float(ratio_max),
            ratio_mean=values["ratio"] / count,
            ratio_p01=ratio_quantile(histogram, 0.01),
            ratio_p50=ratio_quantile(histogram, 0.5),
            ratio_p99=ratio_quantile(histogram, 0.99),
            entropy_mean=values["entropy"] / count,
            kl_old=values["kl_old"] / count,
            kl_reference=values["kl_reference"] / count,
            tokens=int(values["tokens"]),
            **measured,
        )


def ratio_quantile(histogram: np.ndarray[Any, Any], share: float) -> float:
    """The ratio below which `share` of the tokens lie: the middle of its bin; 1 without tokens."""
    total = histogram.sum()
    if not total:
        return 1.0
    width = 2 * HISTOGRAM_BOUND / HISTOGRAM_BINS
    bin_index = int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(np.exp(-HISTOGRAM_BOUND + (bin_index + 0.5) * width))
