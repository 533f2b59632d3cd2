"""Checks of the loop: the engines have the trainer's weights, and a policy agrees with itself before an update."""

from collections.abc import Sequence

from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "fp8": 0.5}
"""Largest gap between trainer and engine that is rounding, in nats; see `train.logprob_gap_limit`."""


def check_push(gap: float, version: int, config: JobConfig) -> None:
    """Raise RuntimeError if the log-probs of trainer and engine differ by more than rounding explains."""
    rounded = config.model.fp8 != "none" or config.engine.quantization != "none"
    limit = config.train.logprob_gap_limit or GAP_LIMITS["fp8" if rounded else config.model.dtype]
    if gap > limit:
        raise RuntimeError(
            f"after the push of version {version} the engine's log-probs differ from the trainer's by {gap:.2e} "
            f"nats, more than train.logprob_gap_limit={limit:g}"
        )


def check_on_policy(updates: Sequence[UpdateStats], config: JobConfig) -> None:
    """Raise RuntimeError if a ratio of the first update, before which nothing changed, is not exactly 1."""
    if not updates or updates[0].skipped:
        return
    first = updates[0]
    # The k3 estimate is 0 only if every single ratio is 1. `not (... == ...)` refuses NaN too.
    if not (first.ratio_max == 1.0 and first.kl_old == 0.0):
        raise RuntimeError(
            f"probability ratios of the first update are not 1: largest {first.ratio_max!r}, k3 {first.kl_old!r}; "
            "old log-probs and training pass do not compute the same thing"
        )
