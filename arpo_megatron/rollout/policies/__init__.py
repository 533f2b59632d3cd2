"""Branch policies: one small pure file each. `make_policy` is where a new one is registered."""

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.rollout.policies.arpo import ArpoPolicy
from arpo_megatron.rollout.policies.arpo_reference import ArpoReferencePolicy
from arpo_megatron.rollout.policies.base import (
    BranchPolicy,
    Decision,
    ForkPoint,
    PathKey,
    fresh_place,
    place_seed,
    shares,
    uniform_draw,
)
from arpo_megatron.rollout.policies.grpo import GrpoPolicy
from arpo_megatron.rollout.policies.random import RandomPolicy

__all__ = [
    "ArpoPolicy",
    "ArpoReferencePolicy",
    "BranchPolicy",
    "Decision",
    "ForkPoint",
    "GrpoPolicy",
    "PathKey",
    "RandomPolicy",
    "fresh_place",
    "make_policy",
    "place_seed",
    "shares",
    "uniform_draw",
]


def make_policy(config: AlgorithmConfig, *, vocabulary_size: int, seed: int) -> BranchPolicy:
    """The policy that `algorithm.name` names."""
    match config.name:
        case "arpo":
            return ArpoPolicy(config, vocabulary_size, seed)
        case "arpo_reference":
            return ArpoReferencePolicy(config, vocabulary_size, seed)
        case "random":
            return RandomPolicy(config, seed)
        case "grpo":
            return GrpoPolicy(config.samples)
