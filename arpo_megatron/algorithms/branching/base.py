"""The protocol of branch policies: how many trajectories to start with, and whether to fork after a tool result.

Policies only decide: they use no clock and no global random state. A decision is a function of its `ForkPoint`, the
settings, and a draw keyed by (run seed, step, task, place in the tree). So it does not depend on which request came
back first.
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
    """A path right after a tool result, when it may fork."""

    task_id: str
    """Task of the tree."""
    step: int
    """Rollout step of the run."""
    path: PathKey
    """The measured MODEL segment."""
    start_entropies: Float32Array
    """float32[n], in nats, of the trajectory's first MODEL segment."""
    before_entropies: Float32Array
    """float32[n], in nats, of the MODEL segment that made the call."""
    entropies: Float32Array
    """float32[<=k], in nats, of the first tokens after the tool result."""
    budget: int = 0
    """Forks that may still be granted, by the fork budget (`budget`)."""
    streak: int = 0
    """Number of this path's fork points right before this one that have all forked."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A first trajectory that was finished before any other was started."""

    start_entropies: Float32Array
    """float32[n], in nats, of its first MODEL segment."""
    tool_entropies: tuple[Float32Array, ...]
    """float32[n], in nats, of each MODEL segment after a tool result."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of siblings to start next to the measured path (0: no fork), and the record of the reason."""

    siblings: int
    record: BranchRecord


class BranchPolicy(Protocol):
    """Distributes a task's trajectories over its tree."""

    @property
    def initial(self) -> int:
        """N: trajectories sampled from the prompt at the start."""

    @property
    def total(self) -> int:
        """M: trajectories of the finished tree."""

    @property
    def measured_tokens(self) -> int:
        """k: tokens to sample after a tool result before `decide` is called; 0: it is never called.

        They bring the tool result into the engine's cache before siblings need it.
        """

    def decide(self, point: ForkPoint) -> Decision:
        """Decide about one fork point. Pure; `siblings` never exceeds `point.budget`."""


@runtime_checkable
class ProbingPolicy(Protocol):
    """A policy that chooses N after one finished trajectory, which counts as the first of the N and does not fork."""

    def plan(self, probe: Probe) -> int:
        """Return N, from 2 to M. Pure."""


def initial_budgets(policy: BranchPolicy, initial: int) -> list[int]:
    """Return the forks that are reserved for each of the N first trajectories. A probe gets none of the M - N."""
    probes = int(isinstance(policy, ProbingPolicy))
    return [0] * probes + split_budget(policy.total - initial, initial - probes)


@dataclass(frozen=True, slots=True)
class ForkingPolicy:
    """Base of policies with a fork budget; they add `decide`."""

    config: AlgorithmConfig
    """M, N, Z, alpha, beta, tau and k."""

    @property
    def initial(self) -> int:
        """Return N, `algorithm.initial_rollouts`."""
        return self.config.initial_rollouts

    @property
    def total(self) -> int:
        """Return M, `algorithm.group_size`."""
        return self.config.group_size

    @property
    def max_siblings(self) -> int:
        """Return the most siblings of one fork, Z - 1."""
        return self.config.beam_size - 1

    @property
    def reserves_forks(self) -> bool:
        """Whether forks are reserved by path (`budget.ReservedForks`) instead of pooled by task."""
        return self.config.fork_budget == "reserved"

    @property
    def measured_tokens(self) -> int:
        """Return k; 0 if no fork is possible."""
        config, fewest = self.config, 2 if isinstance(self, ProbingPolicy) else self.initial
        return config.entropy_tokens if config.beam_size > 1 and config.group_size > fewest else 0


def fork(point: ForkPoint, beam: int, *, wanted: bool, why: str) -> tuple[int, str]:
    """Return the number of siblings to start, and why: a fork fills the beam as far as the path's budget allows."""
    siblings = min(beam - 1, point.budget) if wanted else 0
    return siblings, why if siblings or not wanted else "budget spent"


def split_budget(forks: int, paths: int) -> list[int]:
    """Divide forks among paths as evenly as possible; earlier places get the remainder."""
    return [forks // paths + (index < forks % paths) for index in range(paths)]


def fresh_path_key(initial: int, ended: PathKey, number: int) -> PathKey:
    """Return the place of a trajectory that replaces an unused fork: after the `initial` ones, by the path that left
    it.

    Args:
        initial: N.
        ended: the last segment of the path that did not use the fork; () for forks of a pool.
        number: index of the fork among those that were left.
    """
    return (initial, len(ended), *ended, number)


def ended_path_key(place: PathKey) -> PathKey | None:
    """Return the `ended` of a `fresh_path_key`; None for the place of another trajectory from the prompt."""
    return place[2 : 2 + place[1]] if len(place) > 1 else None


def uniform_draw(seed: int, step: int, task_id: str, path: PathKey) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    return float(np.random.default_rng(_sequence(seed, step, task_id, path)).random())


def path_seed(seed: int, step: int, task_id: str, path: PathKey) -> int:
    """Return a seed in [0, 2**31) for sampling at a place; it depends on the arguments alone.

    An engine with seeded sampling keys its noise by (seed, position), so paths with the same seed would be copies.
    """
    return int(_sequence(seed, step, task_id, path).spawn(1)[0].generate_state(1)[0] >> 1)


def _sequence(seed: int, step: int, task_id: str, path: PathKey) -> np.random.SeedSequence:
    digest = hashlib.sha256(task_id.encode()).digest()
    words = [int.from_bytes(digest[start : start + 4], "big") for start in range(0, 16, 4)]
    return np.random.SeedSequence([seed, step, *words, *path])
