"""Bias and noise of gradients from tokens that another policy has sampled, exact by enumeration of a small problem."""

from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

import numpy as np

from arpo_megatron.algorithms.importance import Correction, sampling_weights
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import Role, RolloutTree

LOW, HIGH = 0.5, 2.0
KL_NATS = (0.02, 0.2, 1.0, 2.0)


def bench_importance(tokens: int = 10, kl_nats: Sequence[float] = KL_NATS, seed: int = 1) -> dict[str, Any]:
    """Compare the corrections of `algorithm.sampling_correction` on all trajectories of binary tokens.

    The policy has a logit for each position and previous token. The reward of a trajectory is 1 if at least 60 % of its
    tokens are 1, so that credit depends on all tokens. The advantage is the reward minus its mean over the samples.
    The gradient is that of the mean over tokens of A * log-prob; a batch is taken to be large, so weights are divided
    by their expectation.

    Args:
        tokens: length of a trajectory; 2**tokens trajectories are enumerated.
        kl_nats: KL(policy that samples || policy of the step) of a whole trajectory.
        seed: draws both policies.

    Returns:
        For each divergence and correction `bias`, the distance of the expected gradient from the one of on-policy
        samples over its length; `noise`, the standard deviation of one trajectory's gradient over that of an on-policy
        one; and `weights_mean` before the division.
    """
    rng = np.random.default_rng(seed)
    problem = _Problem(tokens)
    policy, direction = rng.normal(0, 0.5, (tokens, 2)), rng.normal(0, 1, (tokens, 2))
    rows = []
    for kl in kl_nats:
        other = policy + direction * _scale_for(problem, policy, direction, kl)
        rows.append({"kl_nats": kl, "kl_nats_per_token": kl / tokens, **_compare(problem, policy, other)})
    return {"tokens": tokens, "seed": seed, "rows": rows}


class _Problem:
    def __init__(self, tokens: int) -> None:
        self.bits = np.array(list(product((0, 1), repeat=tokens)))
        """int[trajectories, tokens]."""
        previous = np.concatenate([np.zeros((len(self.bits), 1), int), self.bits[:, :-1]], 1)
        self.context = np.eye(2)[previous]
        """float64[trajectories, tokens, 2], one-hot previous token."""
        self.reward = (self.bits.mean(1) >= 0.6).astype(np.float64)

    def logprobs(self, logits: Floats) -> Floats:
        """Return float64[trajectories, tokens] in nats for logits[tokens, 2] of token 1."""
        ones = (self.context * logits).sum(-1)
        return np.asarray(-np.logaddexp(0, np.where(self.bits == 1, -ones, ones)))

    def scores(self, logits: Floats) -> Floats:
        """Return the gradient of each token's log-prob, float64[trajectories, tokens, 2]."""
        chance = 1 / (1 + np.exp(-(self.context * logits).sum(-1)))
        return np.asarray((self.bits - chance)[..., None] * self.context)


def _scale_for(problem: _Problem, policy: Floats, direction: Floats, kl: float) -> float:
    """Return the length of a step along `direction` after which KL(moved || policy) is `kl` nats, by bisection."""
    low, high = 0.0, 64.0
    base = problem.logprobs(policy).sum(1)
    for _ in range(60):
        middle = (low + high) / 2
        moved = problem.logprobs(policy + middle * direction).sum(1)
        low, high = (middle, high) if np.exp(moved) @ (moved - base) < kl else (low, middle)
    return low


def _compare(problem: _Problem, policy: Floats, other: Floats) -> dict[str, Any]:
    new, sampled = problem.logprobs(policy), problem.logprobs(other)
    on_policy, spread = _gradient(problem, policy, np.exp(new.sum(1)), np.ones_like(new))
    weights = {name: _weights(new - sampled, name) for name in get_args(Correction)}
    chances, found = np.exp(sampled.sum(1)), {}
    for name, own in weights.items():
        mean = float(chances @ own.mean(1))
        expected, noise = _gradient(problem, policy, chances, own / mean)
        found[name] = {
            "bias": float(np.linalg.norm(expected - on_policy) / np.linalg.norm(on_policy)),
            "noise": noise / spread,
            "weights_mean": mean,
        }
    return found


def _gradient(problem: _Problem, policy: Floats, chances: Floats, weights: Floats) -> tuple[Floats, float]:
    """Return expectation and standard deviation of a trajectory's gradient, with the trajectories' probabilities."""
    advantage = problem.reward - chances @ problem.reward
    scores = (problem.scores(policy) * weights[..., None]).reshape(len(chances), -1) * advantage[:, None]
    mean = chances @ scores
    return mean, float(np.sqrt(chances @ ((scores - mean) ** 2).sum(1)))


def _weights(log_ratios: Floats, correction: Correction) -> Floats:
    """Return the weights of all tokens before the division by their mean, float64[trajectories, tokens]."""
    rows = []
    for values in log_ratios:
        tree = RolloutTree("task", [0])
        tree.add(0, Role.MODEL, range(len(values)))
        found = sampling_weights([tree], [np.concatenate([[0.0], values])], correction, low=LOW, high=HIGH)
        rows.append(found.tokens[0][1:] * found.leaves[0] * found.statistics.get("weights_mean", 1.0))
    return np.array(rows)
