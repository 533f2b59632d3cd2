"""What every branch policy answers: how many trajectories to begin with, and whether to fork where a tool has answered.

Policies decide and do nothing else: no clock, no global random state. A decision follows from its `ForkPoint`, the
settings, and a draw keyed by (run seed, step, task, place in the tree), so it is the same whichever request came back
first.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.tree import BranchRecord, Float32Array

PathKey = tuple[int, ...]
"""A place in a tree: the child taken at every segment from the root. Unlike an index it does not depend on timing."""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """What is known where a path goes on after a tool result.

    Attributes:
        task_id: the tree's task.
        step: rollout step of the run.
        path: the measured MODEL segment.
        start_entropies: float32[n], nats: of the trajectory's first MODEL segment.
        before_entropies: float32[n], nats: of the MODEL segment that made the call.
        entropies: float32[<=k], nats: of the first tokens after the tool result.
        budget: forks that are reserved for this path (see `split_budget`).
        streak: fork points of this path right before this one that have all forked.
    """

    task_id: str
    step: int
    path: PathKey
    start_entropies: Float32Array
    before_entropies: Float32Array
    entropies: Float32Array
    budget: int
    streak: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """A first trajectory that was finished by itself.

    Attributes:
        start_entropies: float32[n], nats: of its first MODEL segment.
        tool_entropies: likewise of each MODEL segment behind a tool result.
    """

    start_entropies: Float32Array
    tool_entropies: tuple[Float32Array, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """How many siblings to fork off beside the measured path (0: go on), and the record of why."""

    siblings: int
    record: BranchRecord


class BranchPolicy(Protocol):
    """Distribution of a task's trajectories over its tree."""

    @property
    def initial(self) -> int:
        """N: trajectories sampled from the prompt before anything is known."""

    @property
    def total(self) -> int:
        """M: trajectories of the finished tree."""

    @property
    def measured_tokens(self) -> int:
        """k: tokens to sample after a tool result before `decide` is asked; 0: never ask.

        They bring the tool result into the engine's cache before siblings ask for it.
        """

    def decide(self, point: ForkPoint) -> Decision:
        """Pure. `siblings` never exceeds `point.budget`."""


@runtime_checkable
class ProbingPolicy(Protocol):
    """A `BranchPolicy` that sets N by a first trajectory, which is one of the N, takes place 0 and does not fork."""

    def plan(self, probe: Probe) -> int:
        """N, from 2 to M. Pure."""


def initial_budgets(policy: BranchPolicy, initial: int) -> list[int]:
    """Forks that are reserved for each of the N first trajectories; the M - N are not a probe's."""
    probes = int(isinstance(policy, ProbingPolicy))
    return [0] * probes + split_budget(policy.total - initial, initial - probes)


@dataclass(frozen=True, slots=True)
class ForkingPolicy:
    """What policies with a fork budget have in common; `decide` is theirs."""

    config: AlgorithmConfig

    @property
    def initial(self) -> int:
        """N."""
        return self.config.initial_rollouts

    @property
    def total(self) -> int:
        """M."""
        return self.config.group_size

    @property
    def measured_tokens(self) -> int:
        """k; 0 where no fork is possible."""
        config = self.config
        return config.entropy_tokens if config.beam_size > 1 and config.group_size > config.initial_rollouts else 0


def fork(point: ForkPoint, beam: int, *, wanted: bool, why: str) -> tuple[int, str]:
    """Siblings to start, and why so many: a fork fills the beam as far as the path's forks go."""
    siblings = min(beam - 1, point.budget) if wanted else 0
    return siblings, why if siblings or not wanted else "budget spent"


def split_budget(forks: int, paths: int) -> list[int]:
    """Divide forks among paths in the order of their places, as evenly as can be; earlier places get the remainder.

    So the budget of a task is reserved: M - N among its N first trajectories, and what a path has left at a fork among
    itself and its new siblings. Which path forks then never depends on which request came back first.
    """
    return [forks // paths + (place < forks % paths) for place in range(paths)]


def fresh_path_key(initial: int, ended: PathKey, number: int) -> PathKey:
    """Where a trajectory begins that takes the place of a fork: behind the `initial` ones, by the path that left it.

    Args:
        initial: N.
        ended: the last segment of the path that did not use the fork.
        number: counts such forks of the path.
    """
    return (initial, len(ended), *ended, number)


def uniform_draw(seed: int, step: int, task_id: str, path: PathKey) -> float:
    """A number in [0, 1) that depends on the arguments alone."""
    return float(np.random.default_rng(_sequence(seed, step, task_id, path)).random())


def path_seed(seed: int, step: int, task_id: str, path: PathKey) -> int:
    """A seed in [0, 2**31) for what the engine samples at a place; it too depends on the arguments alone.

    An engine with seeded sampling keys its noise by (seed, position), so paths that shared one would be copies.
    """
    return int(_sequence(seed, step, task_id, path).spawn(1)[0].generate_state(1)[0] >> 1)


def _sequence(seed: int, step: int, task_id: str, path: PathKey) -> np.random.SeedSequence:
    digest = hashlib.sha256(task_id.encode()).digest()
    words = [int.from_bytes(digest[start : start + 4], "big") for start in range(0, 16, 4)]
    return np.random.SeedSequence([seed, step, *words, *path])
