"""How uncertain a beginning is."""

import math

from arpo_megatron.algorithms.branching.base import ForkPoint
from arpo_megatron.tree import Float32Array


def extrapolated(entropies: Float32Array, tokens: int) -> float:
    """Entropy of the first `tokens` tokens in nats, extrapolated by their mean from fewer; 0 for none."""
    first = entropies[:tokens]
    return float(first.mean(dtype=float)) * tokens if len(first) else 0.0


def entropy_rise(point: ForkPoint, tokens: int, vocabulary_size: int) -> float:
    """dH: how much more of `extrapolated` there is after the tool result than at the start, over log V."""
    rise = extrapolated(point.entropies, tokens) - extrapolated(point.start_entropies, tokens)
    return rise / math.log(vocabulary_size)
