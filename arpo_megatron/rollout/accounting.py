"""What growing cost, and what it should have cost.

`predicted_requests` replays from finished trees alone which requests the grower must have made and how much of each
prompt the engine's radix cache must have held. The engine reports what it really served from there; it lies outside
the predicted bounds only when something is wrong (evicted prefixes, a lost prefill, requests that were repeated).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from arpo_megatron.algorithms.branching import BranchPolicy, ProbingPolicy
from arpo_megatron.rollout.prefix_cache import PrefixCache
from arpo_megatron.tree import Int32Array, Role, RolloutTree

SHORTEST_SHARED_PREFIX = 16
"""Tokens that all prompts must begin with for the grower to prefill them once, before any prompt."""


@dataclass(slots=True)
class RolloutCounts:
    """What is counted while trees grow; the grower adds to it.

    Attributes:
        requests: answered engine requests, prefills included.
        prompt_tokens: tokens sent with them.
        cached_tokens: how many of those the engine served from its radix cache.
        tokens_sampled: tokens the engine sampled.
        tokens_recorded: those of them that the tree's record already held when it went on from there.
        calls_executed: tool calls that were sent to the tool service.
        calls_cached: how many of those it answered from its cache.
        repeated: attempts of requests and calls that had to be made again because a service failed.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_sampled: int = 0
    tokens_recorded: int = 0
    calls_executed: int = 0
    calls_cached: int = 0
    retries: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens

    def clear(self) -> None:
        """Begin anew."""
        for field in fields(self):
            setattr(self, field.name, 0)

    def add(self, other: "RolloutCounts") -> None:
        """Add another count to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Costs of one call of `grow`: counted on the way (`RolloutCounts`), and derived from the finished trees.

    Attributes:
        counts: of all trees, failed ones included.
        trees: finished trees.
        failed: trees that could not be finished.
        trajectories: leaves of the finished trees.
        forks: trajectories that began at a fork behind a tool result.
        calls_inherited: tool results that a trajectory shares with one that made the call, counted once for each
            further trajectory.
        unique_tokens: tokens of the trees, each once.
        flat_tokens: tokens of all trajectories, shared ones counted for each.
        given_tokens: those of the unique ones that the model did not sample: prompts and tool results.
        predicted_prompt_tokens: tokens that should have been sent to the engine.
        predicted_cached_tokens: how many of those its cache should have served, starting empty: the middle between the
            bounds of `PredictedRequest`, so at most half their distance off whatever the timing was.
        seconds: wall time.
    """

    counts: RolloutCounts
    trees: int
    failed: int
    trajectories: int
    forks: int
    calls_inherited: int
    unique_tokens: int
    flat_tokens: int
    given_tokens: int
    predicted_prompt_tokens: int
    predicted_cached_tokens: float
    seconds: float

    @property
    def prefill_over_unique(self) -> float:
        """Tokens that the engine computed as part of a prompt, over the tokens of the trees; at most 1.05 is wanted."""
        return self.counts.prefilled_tokens / max(1, self.unique_tokens)

    @property
    def cached_share(self) -> float:
        """Part of the prompt tokens that the engine took from its cache."""
        return self.counts.cached_tokens / max(1, self.counts.prompt_tokens)

    @property
    def predicted_cached_share(self) -> float:
        """The same from the trees alone."""
        return self.predicted_cached_tokens / max(1, self.predicted_prompt_tokens)


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """One engine request: tokens sent, and bounds of how many of them the cache served.

    Attributes:
        prompt_tokens: tokens sent.
        cached_least: those that an earlier request of the same path or fork point has put into the cache.
        cached_most: those that any earlier request has, if requests came one after the other: trajectories that sampled
            equal tokens find each other's, unless they are in flight at the same moment.
    """

    prompt_tokens: int
    cached_least: int
    cached_most: int


def rollout_stats(
    trees: Sequence[RolloutTree],
    counts: RolloutCounts,
    policy: BranchPolicy,
    *,
    failed: int,
    seconds: float,
    inside_stop: Callable[[Int32Array], bool] | None = None,
) -> RolloutStats:
    """Put counts and finished trees together; `inside_stop` as for `predicted_requests`."""
    requests = predicted_requests(trees, policy, inside_stop)
    forks = inherited = trajectories = 0
    for tree in trees:
        leaves = tree.leaves()
        trajectories += len(leaves)
        tools = [segment.role is Role.TOOL for segment in tree.segments]
        inherited += sum(tools[index] for leaf in leaves for index in tree.path(leaf)) - sum(tools)
        forks += tree.forks
    return RolloutStats(
        counts=counts,
        trees=len(trees),
        failed=failed,
        trajectories=trajectories,
        forks=forks,
        calls_inherited=inherited,
        unique_tokens=sum(tree.unique_tokens for tree in trees),
        flat_tokens=sum(tree.flat_tokens for tree in trees),
        given_tokens=sum(len(s) for tree in trees for s in tree.segments if s.role is not Role.MODEL),
        predicted_prompt_tokens=sum(request.prompt_tokens for request in requests),
        predicted_cached_tokens=sum(request.cached_least + request.cached_most for request in requests) / 2,
        seconds=seconds,
    )


def tokens_per_second(stats: Sequence[RolloutStats]) -> float:
    """Tokens sampled a second. What was sampled before trees went on from their records took other seconds."""
    sampled = sum(each.counts.tokens_sampled - each.counts.tokens_recorded for each in stats)
    return sampled / max(1e-9, sum(each.seconds for each in stats))


def common_prefix_length(prompts: Sequence[Int32Array]) -> int:
    """How many tokens all prompts begin with; 0 for fewer than two prompts, or where it is not worth a request."""
    if len(prompts) < 2:
        return 0
    shortest = min(len(prompt) for prompt in prompts)
    same = np.ones(shortest, dtype=bool)
    for prompt in prompts[1:]:
        same &= prompt[:shortest] == prompts[0][:shortest]
    length = shortest if same.all() else int(same.argmin())
    return length if length >= SHORTEST_SHARED_PREFIX else 0


def predicted_requests(
    trees: Sequence[RolloutTree], policy: BranchPolicy, inside_stop: Callable[[Int32Array], bool] | None = None
) -> list[PredictedRequest]:
    """The requests behind trees that grew together, under `policy`, on an engine whose cache was empty.

    That holds where no weight push fell between them.

    First the prefix that all prompts share, then each prompt (once, where several trajectories begin there); then one
    request for a MODEL segment, or two where a branching decision was taken behind its first k tokens, and one more for
    each token that was sampled by itself because those k ended within a tag. What the engine holds are the tokens that
    were fed to the model: all but the last one that a request samples. It always computes a prompt's last token, whose
    logits are wanted.

    Args:
        trees: finished ones.
        policy: how they branched.
        inside_stop: whether the tokens of a segment so far end within a string that ends generations (see
            `protocol.ends_inside_stop`); None: in none, as where every tag is a single token.
    """
    cache = PrefixCache()
    requests: list[PredictedRequest] = []

    def ask(prompt: Int32Array, least: int) -> None:
        sure = min(least, len(prompt) - 1)
        requests.append(PredictedRequest(len(prompt), sure, max(sure, min(cache.insert(prompt), len(prompt) - 1))))

    shared = common_prefix_length([tree.prompt_ids for tree in trees])
    if shared:
        ask(trees[0].prompt_ids[:shared], 0)
    prefilled = policy.initial > 1 and not isinstance(policy, ProbingPolicy)  # a probe brings its prompt itself
    if prefilled:
        for tree in trees:
            ask(tree.prompt_ids, shared)
    begun: set[tuple[int, int]] = set()  # (tree, segment) below which a request has been made
    for number, index in _model_segments_by_level(trees):
        tree = trees[number]
        segment, parent = tree.segments[index], tree.segments[tree.segments[index].parent]
        path = tree.path_tokens(index)
        above = len(path) - len(segment)
        place = (number, segment.parent)
        if parent.role is Role.MODEL:
            least = 0  # cut short by a weight push, which emptied the cache
        elif parent.role is Role.PROMPT:
            least = above if prefilled or place in begun else shared
        else:  # below a tool result: the first request brings it, behind the last sampled token, which was never fed
            least = above if place in begun else above - len(parent) - 1
        begun.add(place)
        ask(path[:above], least)
        sampled = len(segment) if segment.branch is None else policy.measured_tokens
        while sampled < len(segment):
            so_far = path[: above + sampled]
            cache.insert(so_far[:-1])
            ask(so_far, len(so_far) - 1)
            alone = inside_stop is not None and inside_stop(so_far[above:])
            sampled = sampled + 1 if alone else len(segment)
        cache.insert(path[:-1])
    return requests


def _model_segments_by_level(trees: Sequence[RolloutTree]) -> list[tuple[int, int]]:
    """(tree, segment) of the MODEL segments of all trees, those nearer to the root first."""
    found = []
    for number, tree in enumerate(trees):
        levels: list[int] = []
        for index, segment in enumerate(tree.segments):
            levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 0)
            if segment.role is Role.MODEL:
                found.append((levels[index], number, index))
    return [(number, index) for _, number, index in sorted(found)]
