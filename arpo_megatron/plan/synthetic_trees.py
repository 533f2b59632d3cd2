"""Seeded families of synthetic rollout trees, with lengths and forks like those of real agents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.tree import Role, RolloutTree

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mix:
    """Family of trees that fork like ARPO's."""

    samples: int
    """M, trajectories per task."""
    initial: int
    """N, trajectories from the prompt before any fork."""
    calls: int
    """Tool calls per trajectory."""
    prompt: int
    """Tokens of the prompt."""
    segment: Range
    """Smallest and largest number of tokens of a MODEL segment."""
    result: Range
    """Smallest and largest number of tokens of a tool result."""
    fork_probability: float = 0.5
    """Probability of a fork after a tool result while there is budget."""

    def tree(self, seed: int, vocabulary: int) -> RolloutTree:
        """Generate a tree.

        All paths advance by one call at a time, and each tool result may fork once until M paths exist. The remaining
        budget goes to fresh trajectories.
        """
        rng = np.random.default_rng(seed)
        tree = RolloutTree(str(seed), rng.integers(0, vocabulary, self.prompt))
        paths, total = [0] * self.initial, self.initial
        for _ in range(self.calls):
            ends = [self._call(tree, parent, rng, vocabulary) for parent in paths]
            paths = []
            for end in ends:
                forks = total < self.samples and rng.random() < self.fork_probability
                paths += [end, end] if forks else [end]
                total += forks
        for end in paths:
            tree.add(end, Role.MODEL, _tokens(rng, self.segment, vocabulary))
        for _ in range(self.samples - total):
            end = 0
            for _ in range(self.calls):
                end = self._call(tree, end, rng, vocabulary)
            tree.add(end, Role.MODEL, _tokens(rng, self.segment, vocabulary))
        return tree

    def _call(self, tree: RolloutTree, parent: int, rng: np.random.Generator, vocabulary: int) -> int:
        call = tree.add(parent, Role.MODEL, _tokens(rng, self.segment, vocabulary))
        return tree.add(call, Role.TOOL, _tokens(rng, self.result, vocabulary))


@dataclass(frozen=True, slots=True)
class TurnMix:
    """Family of multi-turn dialogues in which every turn is a sample: leaves along one trunk, as in tau2-bench."""

    turns: int
    """Leaves. Each is attached one turn further along the trunk than the one before."""
    prompt: int
    """Tokens of policy and tool descriptions."""
    segment: Range
    """Smallest and largest number of MODEL tokens of a leaf or a turn."""
    result: Range
    """Smallest and largest number of tokens of a reply by user or tool."""

    def tree(self, seed: int, vocabulary: int) -> RolloutTree:
        """Return a dialogue of random tokens below `vocabulary`, the same for the same seed."""
        rng = np.random.default_rng(seed)
        tree = RolloutTree(str(seed), rng.integers(0, vocabulary, self.prompt))
        trunk = 0
        for turn in range(self.turns):
            end = tree.add(trunk, Role.MODEL, _tokens(rng, self.segment, vocabulary))
            if turn < self.turns - 1:
                trunk = tree.add(end, Role.TOOL, _tokens(rng, self.result, vocabulary))
                tree.add(end, Role.MODEL, _tokens(rng, self.segment, vocabulary))
        return tree


MIXES: dict[str, Mix | TurnMix] = {
    "reasoning": Mix(samples=16, initial=8, calls=3, prompt=300, segment=(150, 400), result=(100, 300)),
    "deep_search": Mix(samples=16, initial=4, calls=6, prompt=300, segment=(150, 400), result=(600, 1500)),
    "long_prompt": Mix(samples=16, initial=8, calls=3, prompt=1500, segment=(150, 400), result=(100, 300)),
    "tau2_like": TurnMix(turns=16, prompt=2500, segment=(60, 200), result=(100, 300)),
}
"""Families by name. Their ratios of unique to flattened tokens are 0.673, 0.660, 0.400 and 0.114."""


def flattened(trees: Sequence[RolloutTree]) -> list[RolloutTree]:
    """Return every trajectory as its own tree."""
    flat = []
    for tree in trees:
        for leaf in tree.leaves():
            single = RolloutTree(tree.task_id, tree.prompt_ids)
            for parent, index in enumerate(tree.path(leaf)[1:]):
                single.add(parent, tree.segments[index].role, tree.segments[index].token_ids)
            flat.append(single)
    return flat


def _tokens(rng: np.random.Generator, bounds: Range, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return rng.integers(0, vocabulary, rng.integers(bounds[0], bounds[1] + 1))
