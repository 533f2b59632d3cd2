"""Clip-Cov: a few of the tokens that would cost the most entropy are left out."""

import zlib
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from arpo_megatron.algorithms.base import Batch, MinibatchValue
from arpo_megatron.algorithms.losses.batch_tokens import BatchTokens
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class ClipCov:
    """PPO-clip without some of the tokens whose log-prob and advantage go together (SPEAR, arXiv 2509.22601).

    Of the tokens of all trajectories that PPO does not clip and whose covariance (A - mean A) * (logp - mean logp) lies
    between `covariance_low` and `covariance_high`, `covariance_share` of all tokens (at least one) are drawn and have
    neither value nor gradient. As in SPEAR's released code (`compute_policy_loss_clip_cov`; eq. 18 to 21 of its
    arXiv version 4, as public notes on it number them), which has it from arXiv 2505.22617, eq. 10 and 11; means are
    over the minibatch here. A shared token stands for each of its trajectories, so some of its copies may be left out.
    The draw follows from the tasks and the step.

    Attributes:
        clip_low: lower bound of the ratio, as its distance to 1.
        clip_high: upper bound likewise.
        covariance_share: share of tokens that are left out.
        covariance_low: lowest covariance of those.
        covariance_high: highest.
    """

    clip_low: float
    clip_high: float
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 0.0002
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def value(self, batch: Batch) -> MinibatchValue:
        """The loss and the coefficient of every token."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        whole = BatchTokens.of(batch)
        token, given, weight = self._copies(whole, batch)
        logprob = np.nan_to_num(np.concatenate([np.zeros(0), *batch.logprobs]))[token]
        ratio = whole.ratio[token]
        clipped = ((given > 0) & (ratio > high)) | ((given < 0) & (ratio < low))
        covariance = (given - _mean(given)) * (logprob - _mean(logprob))
        near = ~clipped & (covariance > self.covariance_low) & (covariance < self.covariance_high)
        count = min(int(near.sum()), max(int(self.covariance_share * len(token)), 1))
        key = "-".join(f"{tree.task_id}/{tree.step}" for tree in batch.trees)
        drawn = np.random.default_rng(zlib.crc32(key.encode())).permutation(np.flatnonzero(near))[:count]
        lost = np.zeros((2, len(whole.ratio)))
        np.add.at(lost[0], token[drawn], weight[drawn] * np.maximum(given[drawn], 0.0))
        np.add.at(lost[1], token[drawn], weight[drawn] * np.minimum(given[drawn], 0.0))
        left = replace(
            whole,
            positive=np.maximum(whole.positive - lost[0], 0.0),  # of float32 sums
            negative=np.minimum(whole.negative - lost[1], 0.0),
        )
        found = left.clipped(low, high, None, left.ratio)
        return replace(found, statistics={**found.statistics, **left.masked_share(whole)})

    def _copies(self, tokens: BatchTokens, batch: Batch) -> tuple[np.ndarray, Floats, Floats]:
        """Of every MODEL token of every trajectory: its place in the columns, advantage, and weight."""
        places, advantages, weights = [np.zeros(0, int)], [np.zeros(0)], [np.zeros(0)]
        start = 0
        for shape, given, own in zip(tokens.shapes, batch.advantages, batch.weights, strict=True):
            owners = np.repeat(np.arange(len(shape.lengths)), shape.lengths)
            for row in range(len(shape.leaves)):
                spots = np.flatnonzero((shape.below[row] & shape.is_model)[owners])
                places.append(start + spots)
                advantages.append(given[row][owners[spots]] if given.ndim == 2 else np.full(len(spots), given[row]))
                weights.append(np.full(len(spots), own[row]))
            start += len(owners)
        return np.concatenate(places), np.concatenate(advantages), np.concatenate(weights)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
