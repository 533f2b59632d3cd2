"""Clip-Cov: some of the tokens that would reduce the entropy most get no gradient."""

import zlib
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import BatchValue, LossBatch
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class ClipCov:
    """PPO-clip without some of the tokens whose log-prob and advantage vary together (SPEAR, arXiv 2509.22601).

    Candidates are the tokens of all trajectories that PPO does not clip and whose covariance (A - mean A) * (logp -
    mean logp) lies between `covariance_low` and `covariance_high`. Of these, `covariance_share` of all tokens (at least
    one) are drawn and get neither value nor gradient. This follows SPEAR's released code
    (`compute_policy_loss_clip_cov`), which takes it from arXiv 2505.22617. The equation numbers (18 to 21 of version 4;
    10 and 11 there) come from public notes and were not checked in the papers. Here the means are over the batch. A
    shared token stands for each of its trajectories, so single copies of it may be drawn. The draw is a function of the
    tasks and the step.
    """

    clip_low: float
    """Lower bound of the ratio, as its distance to 1."""
    clip_high: float
    """Upper bound of the ratio, as its distance to 1."""
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of tokens that are drawn."""
    covariance_low: float = 1.0
    """Lowest covariance of a candidate."""
    covariance_high: float = 5.0
    """Highest covariance of a candidate."""

    def value(self, batch: LossBatch) -> BatchValue:
        """Return the loss and the coefficient of every token."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        whole = BatchTokens.of(batch)
        token, advantage, weight = self._copies(whole, batch)
        logprob = np.nan_to_num(np.concatenate([np.zeros(0), *batch.logprobs]))[token]
        ratio = whole.ratio[token]
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        covariance = (advantage - _mean(advantage)) * (logprob - _mean(logprob))
        candidate = ~clipped & (covariance > self.covariance_low) & (covariance < self.covariance_high)
        count = min(int(candidate.sum()), max(int(self.covariance_share * len(token)), 1))
        key = "-".join(f"{tree.task_id}/{tree.step}" for tree in batch.trees)
        drawn = np.random.default_rng(zlib.crc32(key.encode())).permutation(np.flatnonzero(candidate))[:count]
        lost = np.zeros((2, len(whole.ratio)))
        np.add.at(lost[0], token[drawn], weight[drawn] * np.maximum(advantage[drawn], 0.0))
        np.add.at(lost[1], token[drawn], weight[drawn] * np.minimum(advantage[drawn], 0.0))
        kept = replace(
            whole,
            positive=np.maximum(whole.positive - lost[0], 0.0),  # rounding of float32 sums must not change a sign
            negative=np.minimum(whole.negative - lost[1], 0.0),
        )
        value = kept.clipped(low, high, None, kept.ratio)
        return replace(value, statistics={**value.statistics, **kept.masked_share(whole)})

    def _copies(self, tokens: BatchTokens, batch: LossBatch) -> tuple[np.ndarray, Floats, Floats]:
        """Return index, advantage and weight of every MODEL token of every trajectory; the index is that into the
        columns.
        """
        places, advantages, weights = [np.zeros(0, int)], [np.zeros(0)], [np.zeros(0)]
        start = 0
        for shape, given, own in zip(tokens.shapes, batch.advantages, batch.weights, strict=True):
            owners = np.repeat(np.arange(len(shape.lengths)), shape.lengths)
            for row in range(len(shape.leaves)):
                spots = np.flatnonzero((shape.on_path[row] & shape.is_model)[owners])
                places.append(start + spots)
                advantages.append(given[row][owners[spots]] if given.ndim == 2 else np.full(len(spots), given[row]))
                weights.append(np.full(len(spots), own[row]))
            start += len(owners)
        return np.concatenate(places), np.concatenate(advantages), np.concatenate(weights)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
