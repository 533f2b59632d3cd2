"""Checks of the loop: the engines have the trainer's weights, and a policy agrees with itself before an update."""

from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "fp8 engine": 0.5, "fp8": 3.0}
"""Largest gap between trainer and engine that is rounding, in nats; see `train.logprob_gap_limit`. On the quickstart's
probe a trainer in FP8 (emulated) is up to 1.2 from one in bfloat16, with a median of 0.03."""
KL_LIMIT = 1e-3
"""Largest k3 between two passes over one batch that is rounding, in nats: that of log-probs 0.045 nats apart."""


def check_push(gap: float, version: int, config: JobConfig) -> None:
    """Raise RuntimeError if the log-probs of trainer and engine differ by more than rounding explains."""
    engine = "fp8 engine" if config.engine.quantization != "none" else config.model.dtype
    limit = config.train.logprob_gap_limit or GAP_LIMITS["fp8" if config.model.fp8 != "none" else engine]
    if gap > limit:
        raise RuntimeError(
            f"after the push of version {version} the engine's log-probs differ from the trainer's by {gap:.2e} "
            f"nats, more than train.logprob_gap_limit={limit:g}"
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
