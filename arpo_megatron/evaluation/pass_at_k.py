"""Unbiased pass@k, and bootstrap intervals over questions."""

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected best score of `k` attempts drawn without replacement, for one question.

    For scores of 0 and 1, with c ones among n, this is the unbiased estimator 1 - C(n-c, k) / C(n, k) of pass@k (Chen
    et al., arXiv 2107.03374, equation 1). For graded scores such as token F1 it is the same expectation of the maximum:
    the i-th smallest score is the best of C(i-1, k-1) of the C(n, k) draws.

    Args:
        scores: scores of all attempts at the question, in any order.
        k: number of draws, at most the number of attempts.

    Raises:
        ValueError: there are fewer attempts than `k`.
    """
    count = len(scores)
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} attempts")
    weighted = sum(score * comb(rank, k - 1) for rank, score in enumerate(sorted(scores)))
    return float(weighted / comb(count, k))


def interval(values: ArrayLike, *, seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean at `CONFIDENCE`; for fewer than two values, the mean twice.

    Attempts at one question are not independent, so questions are resampled.

    Args:
        values: float[questions], one value per question.
        seed: seed of the resampling.
    """
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        mean = float(data.mean()) if len(data) else float("nan")
        return mean, mean
    from scipy.stats import bootstrap

    found = bootstrap(
        (data,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, 10_000_000 // len(data)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
