"""What must agree: trainer and engine after a push, and a policy with itself before an update."""

from collections.abc import Sequence

from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "fp8": 0.5}
"""Nats between trainer and engine that are rounding; see `TrainConfig.logprob_gap_limit`."""
DELAYED_KL_LIMIT = 1e-2
"""Nats between two passes of one pack with delayed scaling, whose scales change in between."""


def check_push(gap: float, version: int, config: JobConfig) -> None:
    """Raises RuntimeError where the engine's log-probs are further from the trainer's than number formats explain."""
    rounded = config.model.fp8 != "none" or config.engine.quantization != "none"
    limit = config.train.logprob_gap_limit or GAP_LIMITS["fp8" if rounded else config.model.dtype]
    if gap > limit:
        raise RuntimeError(
            f"after the push of version {version} the engine's log-probs differ from the trainer's by {gap:.2e} "
            f"nats, more than train.logprob_gap_limit={limit:g}"
        )


def check_on_policy(updates: Sequence[UpdateStats], config: JobConfig) -> None:
    """On the first minibatch nothing was updated yet: every ratio must be exactly 1 (same packs, same kernels)."""
    if not updates or updates[0].skipped:
        return
    first = updates[0]
    if config.model.fp8 == "delayed":
        if not first.kl_old < DELAYED_KL_LIMIT:
            raise RuntimeError(f"before any update the policy is {first.kl_old!r} nats (k3) from itself")
        return
    # The k3 estimate is 0 only where every single ratio is 1; it is written so that NaN is refused too.
    if not (first.ratio_max == 1.0 and first.kl_old == 0.0):
        raise RuntimeError(
            f"probability ratios of the first minibatch before any update: largest {first.ratio_max!r}, k3 "
            f"{first.kl_old!r}: old log-probs and training pass do not compute the same thing"
        )
