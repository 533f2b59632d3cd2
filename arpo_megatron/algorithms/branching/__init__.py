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
    fresh_path_key,
    initial_budgets,
    path_seed,
    split_budget,
    uniform_draw,
)
from arpo_megatron.algorithms.branching.grpo import GrpoPolicy
from arpo_megatron.algorithms.branching.random_forks import RandomPolicy
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
    "fresh_path_key",
    "initial_budgets",
    "initial_trajectories",
    "make_branch_policy",
    "path_seed",
    "split_budget",
    "uniform_draw",
]


def make_branch_policy(config: AlgorithmConfig, *, vocabulary_size: int, seed: int) -> BranchPolicy:
    """The part that `algorithm.branching` names. Raises UserError."""
    given = {**config.component_params(), "vocabulary_size": vocabulary_size, "seed": seed}
    policy: BranchPolicy = make(ExtensionPoint.BRANCH_POLICY, config.branching, given)
    return policy


def initial_trajectories(config: AlgorithmConfig) -> int:
    """N of a task's M trajectories, as the policy that `algorithm.branching` names has it; M: it never forks.

    Raises:
        UserError: N exceeds M; also see `make_branch_policy`.
    """
    policy = make_branch_policy(config, vocabulary_size=2, seed=0)  # nothing is decided with it
    if policy.initial > policy.total:
        raise UserError(
            f"algorithm.initial_rollouts={policy.initial} exceeds algorithm.group_size={policy.total}, and "
            f"algorithm.branching={config.branching} begins with so many trajectories"
        )
    return policy.initial
