"""Entropy of the first tokens of a segment, and its rise after a tool result."""

import math

from arpo_megatron.algorithms.branching.base import ForkPoint
from arpo_megatron.tree import Float32Array


def extrapolate_entropy(entropies: Float32Array, tokens: int) -> float:
    """Return the entropy of the first `tokens` tokens in nats; if there are fewer, extrapolate by their mean (0 for
    none).
    """
    first = entropies[:tokens]
    return float(first.mean(dtype=float)) * tokens if len(first) else 0.0


def entropy_rise(point: ForkPoint, tokens: int, vocabulary_size: int) -> float:
    """Return dH: the entropy after the tool result minus that of the trajectory's start, over log V."""
    rise = extrapolate_entropy(point.entropies, tokens) - extrapolate_entropy(point.start_entropies, tokens)
    return rise / math.log(vocabulary_size)
