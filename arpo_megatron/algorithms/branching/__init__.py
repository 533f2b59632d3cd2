"""Branch policies, one small pure file each; `registry.BUILTIN` lists their names.

May import `registry`, `config`, `tree` and `errors`, but no other part of `algorithms`.
"""

from arpo_megatron.algorithms.branching.arpo import ArpoPolicy
from arpo_megatron.algorithms.branching.arpo_released import ArpoReleasedPolicy
from arpo_megatron.algorithms.branching.base import (
    BranchPolicy,
    Decision,
    ForkPoint,
    PathKey,
    Probe,
    ProbingPolicy,
    ended_path_key,
    fresh_path_key,
    path_seed,
    uniform_draw,
)
from arpo_megatron.algorithms.branching.budget import ForkBudget, Grant, PathForks, make_fork_budget
from arpo_megatron.algorithms.branching.grpo import GrpoPolicy
from arpo_megatron.algorithms.branching.random_forks import RandomPolicy
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, make

__all__ = [
    "ArpoPolicy",
    "ArpoReleasedPolicy",
    "BranchPolicy",
    "Decision",
    "ForkBudget",
    "ForkPoint",
    "Grant",
    "GrpoPolicy",
    "PathForks",
    "PathKey",
    "Probe",
    "ProbingPolicy",
    "RandomPolicy",
    "ended_path_key",
    "fresh_path_key",
    "initial_trajectories",
    "make_branch_policy",
    "make_fork_budget",
    "path_seed",
    "uniform_draw",
]


def make_branch_policy(config: AlgorithmConfig, *, vocabulary_size: int, seed: int) -> BranchPolicy:
    """Build the policy that `algorithm.branching` names. Raises UserError."""
    params = {**config.component_params(), "vocabulary_size": vocabulary_size, "seed": seed}
    policy: BranchPolicy = make(ExtensionPoint.BRANCH_POLICY, config.branching, params)
    return policy


def initial_trajectories(config: AlgorithmConfig) -> int:
    """Return N of a task's M trajectories according to the policy that `algorithm.branching` names; M if it never
    forks.

    Raises:
        UserError: N exceeds M, or `make_branch_policy` fails.
    """
    policy = make_branch_policy(config, vocabulary_size=2, seed=0)  # takes no decision
    if policy.initial > policy.total:
        raise UserError(
            f"algorithm.initial_rollouts={policy.initial} exceeds algorithm.group_size={policy.total}, and "
            f"algorithm.branching={config.branching} starts with that many trajectories"
        )
    return policy.initial
