"""Statistics of an update: sums that packs and ranks add up, and the metrics computed from them."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

HISTOGRAM_BINS = 65
HISTOGRAM_BOUND = 4.0625
"""Log-ratios are counted in equal bins between -bound and bound nats; values outside count in the last bins."""

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
    """Sums and the largest ratio over the target tokens of one pack, on the policy's device."""

    sums: Tensor
    """float64[sums + bins], additive over packs: `_SUMS`, then the histogram of log-ratios."""
    ratio_max: Tensor
    """float64[], the largest ratio; 0 without tokens."""

    @classmethod
    def of(cls, *, ratio: Tensor, log_ratio: Tensor, entropies: Tensor, **sums: Tensor | None) -> Self:
        """Collect token values and sums; a missing sum is 0."""
        values = {
            "tokens": torch.full((), ratio.numel(), device=ratio.device),
            "ratio": ratio.detach().sum(),
            "entropy": entropies.detach().sum(),
            **{name: value for name, value in sums.items() if value is not None},
        }
        row = [values[name].detach().double() if name in values else _zero(ratio) for name in _SUMS]
        # On the device: the host does not wait for a pack. Counts are exact in any order of additions.
        bounded = log_ratio.detach().double().clamp(-HISTOGRAM_BOUND, HISTOGRAM_BOUND)
        histogram = torch.histc(bounded, HISTOGRAM_BINS, -HISTOGRAM_BOUND, HISTOGRAM_BOUND)
        largest = ratio.detach().max().double() if ratio.numel() else _zero(ratio)
        return cls(torch.cat([torch.stack(row), histogram]), largest)

    def row(self) -> Tensor:
        """Return float64[WIDTH]: the sums, then the maximum."""
        return torch.cat([self.sums, self.ratio_max[None]])


WIDTH = len(_SUMS) + HISTOGRAM_BINS + 1


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=like.device)


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one optimizer update. Means are over target tokens; a shared token counts once."""

    loss: float
    loss_policy: float
    """Policy (or supervised) part of the loss."""
    loss_kl: float
    """KL penalty in the loss."""
    loss_entropy: float
    """Entropy bonus subtracted from the loss."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this update."""
    clip_low_share: float
    """Share of tokens whose negative gradient was clipped below, in [0, 1]."""
    clip_high_share: float
    """Share of tokens whose positive gradient was clipped above, in [0, 1]."""
    clip_dual_share: float
    """Share of tokens whose negative gradient was clipped above (dual clip), in [0, 1]."""
    ratio_max: float
    """Largest ratio of new to old probability."""
    ratio_mean: float
    ratio_p01: float
    """1 % quantile of the ratio, to one bin of the histogram (0.125 nats)."""
    ratio_p50: float
    """Median ratio, to one bin of the histogram."""
    ratio_p99: float
    """99 % quantile of the ratio, to one bin of the histogram."""
    entropy_mean: float
    """Mean entropy of the policy before the update, in nats."""
    kl_old: float
    """Mean k3 estimate of KL(old || new), in nats."""
    kl_reference: float
    """Mean k3 estimate of KL(new || reference), in nats."""
    tokens: int
    """Number of target tokens."""
    skipped: bool
    """Loss or gradient was not finite, so weights and optimizer state are unchanged; the schedule advances."""
    masked_share: float | None = None
    """Share of the batch's weighted advantages, by absolute value, that the loss masked (`ipa`, `hispo`,
    `clip_cov`); None for losses without a mask."""
    weights_mean: float | None = None
    """Mean importance weight before the division by it; 1 without truncation on average. None without a
    `sampling_correction`, like the next three."""
    weights_ess: float | None = None
    """Effective sample size of the importance weights over their number, in (0, 1]."""
    weights_truncated: float | None = None
    """Share of importance weights outside their bounds, in [0, 1]."""
    kl_sampling: float | None = None
    """Mean k3 estimate of KL(policy that sampled || policy of the step), in nats per token."""
    expert_busiest: float | None = None
    """Load of the busiest expert of any layer over the mean load, over tokens of trajectories; None without experts."""
    expert_loss: float | None = None
    """Mean over layers of the router's balancing loss without its coefficient; 1 is level. None without experts."""
    routes_replayed: float | None = None
    """Share of tokens that went to the engine's experts, in [0, 1]; None without experts."""
    routes_differing: float | None = None
    """Share of the replayed experts that the trainer's routers would not have chosen; None without experts."""

    @classmethod
    def of(cls, sums: Tensor, ratio_max: Tensor, **measured: Any) -> Self:
        """Compute the statistics from the sums and the maximum over all packs; `measured` has the fields that follow
        from neither."""
        row = torch.cat([sums, ratio_max.reshape(1)]).cpu().numpy()  # the host waits once
        values = dict(zip(_SUMS, map(float, row), strict=False))
        histogram = row[len(_SUMS) : -1]
        count = max(1.0, values["tokens"])
        return cls(
            loss=values["loss"],
            loss_policy=values["policy"],
            loss_kl=values["penalty"],
            loss_entropy=values["bonus"],
            clip_low_share=values["clipped_low"] / count,
            clip_high_share=values["clipped_high"] / count,
            clip_dual_share=values["clipped_dual"] / count,
            ratio_max=float(row[-1]),
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
    """Return the middle of the bin below which `share` of the ratios lie; 1 without tokens."""
    total = histogram.sum()
    if not total:
        return 1.0
    width = 2 * HISTOGRAM_BOUND / HISTOGRAM_BINS
    bin_index = int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(np.exp(-HISTOGRAM_BOUND + (bin_index + 0.5) * width))
