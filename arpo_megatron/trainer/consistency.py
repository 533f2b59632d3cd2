"""Checks of the loop: the engines have the trainer's weights, and a policy agrees with itself before an update."""

import math

from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "fp8 engine": 0.5, "fp8": 3.0}
"""Largest gap between trainer and engine that is rounding, in nats; see `train.logprob_gap_limit`. On the quickstart's
probe a trainer in FP8 (emulated) is up to 1.2 from one in bfloat16, with a median of 0.03."""
KL_LIMIT = 1e-3
"""Largest k3 between two passes over one batch that is rounding, in nats: that of log-probs 0.045 nats apart."""
FIRST_GAP_FACTOR = 3.0
"""A gap of at most this many times the first push's is rounding too: its maximum over a few tokens varies."""


def gap_limit(first_gap: float | None, config: JobConfig) -> float:
    """Return the largest gap of a push, in nats, that needs no checksums; `first_gap` is that of the first push."""
    engine = "fp8 engine" if config.engine.quantization != "none" else config.model.dtype
    usual = GAP_LIMITS["fp8" if config.model.fp8 != "none" else engine]
    return config.train.logprob_gap_limit or max(usual, FIRST_GAP_FACTOR * (first_gap or 0.0))


def check_push(gap: float, first_gap: float | None, version: int, config: JobConfig, *, equal: bool) -> bool:
    """Return whether the gap is explained; if it is not, the weights must be verified.

    Rounding explains a gap below `gap_limit`, and any finite gap between equal weights. `train.logprob_gap_limit`, if
    it is given, is the limit of every push.

    Args:
        gap: largest difference of log-probs between trainer and engine, in nats.
        first_gap: gap of the run's first push; None if this is the first one.
        version: policy version of the push.
        config: the job.
        equal: checksums have shown that the engine holds the trainer's weights.

    Raises:
        RuntimeError: the gap is not finite, or exceeds `train.logprob_gap_limit`.
    """
    given, limit = config.train.logprob_gap_limit, gap_limit(first_gap, config)
    if gap <= limit:
        return True
    if given is None and math.isfinite(gap):
        return equal  # between equal weights the gap is rounding, to which the policy is sensitive
    bound = f"train.logprob_gap_limit={limit:g}" if given else f"{limit:g} (train.logprob_gap_limit sets another limit)"
    raise RuntimeError(
        f"after the push of version {version} the engine's log-probs differ from the trainer's by {gap:.2e} "
        f"nats, more than {bound}"
    )


def check_on_policy(first: UpdateStats, *, exact: bool) -> None:
    """Raise RuntimeError if the policy differs from itself before the first update of a step.

    Args:
        first: statistics of the training pass of the first batch, before its step.
        exact: every ratio must be 1, as on a CPU. On GPUs NCCL and cuBLAS may add in another order in each pass, so
            the mean k3 estimate is bounded.
    """
    if not exact:
        if not first.kl_old <= KL_LIMIT:  # refuses NaN too
            raise RuntimeError(
                f"before the first update the policy is {first.kl_old:.2e} nats (k3) from its old log-probs, more than "
                f"{KL_LIMIT:g}; old log-probs and training pass do not compute the same thing"
            )
        return
    # The k3 estimate is 0 only if every single ratio is 1. `not (... == ...)` refuses NaN too.
    if not (first.ratio_max == 1.0 and first.kl_old == 0.0):
        raise RuntimeError(
            f"probability ratios of the first update are not 1: largest {first.ratio_max!r}, k3 {first.kl_old!r}; "
            "old log-probs and training pass do not compute the same thing"
        )
