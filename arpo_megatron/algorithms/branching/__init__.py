"""Branch policies: one small pure file each. Their names are in `plugins.BUILTIN`."""

from arpo_megatron.algorithms.branching.arpo import ArpoPolicy
from arpo_megatron.algorithms.branching.arpo_reference import ArpoReferencePolicy
from arpo_megatron.algorithms.branching.base import (
    BranchPolicy,
    Decision,
    ForkPoint,
    PathKey,
    Probe,
    ProbingPolicy,
    begin,
    fresh_place,
    place_seed,
    shares,
    uniform_draw,
)
from arpo_megatron.algorithms.branching.grpo import GrpoPolicy
from arpo_megatron.algorithms.branching.random import RandomPolicy
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, make

__all__ = [
    "ArpoPolicy",
    "ArpoReferencePolicy",
    "BranchPolicy",
    "Decision",
    "ForkPoint",
    "GrpoPolicy",
    "PathKey",
    "Probe",
    "ProbingPolicy",
    "RandomPolicy",
    "begin",
    "first_trajectories",
    "fresh_place",
    "make_policy",
    "place_seed",
    "shares",
    "uniform_draw",
]


def make_policy(config: AlgorithmConfig, *, vocabulary_size: int, seed: int) -> BranchPolicy:
    """The part that `algorithm.branching` names. Raises UserError."""
    given = {**config.given(), "vocabulary_size": vocabulary_size, "seed": seed}
    policy: BranchPolicy = make(ExtensionPoint.BRANCH_POLICY, config.branching, given)
    return policy


def first_trajectories(config: AlgorithmConfig) -> int:
    """N of a task's M trajectories, as the policy that `algorithm.branching` names has it; M: it never forks.

    Raises:
        UserError: N exceeds M; also see `make_policy`.
    """
    policy = make_policy(config, vocabulary_size=2, seed=0)  # nothing is decided with it
    if policy.initial > policy.total:
        raise UserError(
            f"algorithm.initial_rollouts={policy.initial} exceeds algorithm.group_size={policy.total}, and "
            f"algorithm.branching={config.branching} begins with so many trajectories"
        )
    return policy.initial
