"""Costs of rollouts: what is counted while trees grow, and what follows from the finished trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.rollout.cache_prediction import predict_tree_requests
from arpo_megatron.rollout.shared_prefixes import common_prefix_length
from arpo_megatron.tree import Int32Array, Role, RolloutTree


@dataclass(slots=True)
class RolloutCounts:
    """Counts of requests and tokens, added up while trees grow."""

    requests: int = 0
    """Answered engine requests, including prefills."""
    prompt_tokens: int = 0
    """Tokens in the prompts of these requests."""
    cached_tokens: int = 0
    """Prompt tokens that the engine took from its radix cache."""
    tokens_sampled: int = 0
    """Tokens that the engine sampled."""
    tokens_recorded: int = 0
    """Sampled tokens that came from the record of a restored tree."""
    calls_executed: int = 0
    """Tool calls that the tool service answered, by running them or from its cache."""
    calls_cached: int = 0
    """Those of them that it answered from its cache."""
    calls_invalid: int = 0
    """Tool calls that got an error because they cannot be executed as written: no JSON object, or an unknown tool."""
    calls_at_limit: int = 0
    """Tool calls that got a notice that a limit is reached (`rollout.at_limit`)."""
    calls_repeated: int = 0
    """Tool calls that were not executed because their path had made them before (`rollout.refuse_repeated`)."""
    calls_failed: int = 0
    """Tool calls without a result, because a service, the network or a provider failed; each ended its branch."""
    seconds_saved: float = 0.0
    """Seconds that results of equal calls of a task had taken, once for each further call."""
    retries: int = 0
    """Attempts of requests and tool calls that were repeated because a service failed."""
    tokens_recomputed: int = 0
    """Prompt tokens that the engine had computed for the same path and computed again: they were evicted. Known with
    admission only, like `evicted`."""
    evicted: int = 0
    """How often a path found fewer of its tokens in the cache than it had left there."""
    suspended: int = 0
    """How often a path had to wait in its middle because the KV pool was full."""
    admission_s: float = 0.0
    """Seconds that requests waited for admission, added up."""
    longest_request_s: float = 0.0
    """Seconds of the longest answered request, from the start of its last attempt."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens

    def clear(self) -> None:
        """Set all counts to 0."""
        for field in fields(self):
            setattr(self, field.name, 0)

    def add(self, other: "RolloutCounts") -> None:
        """Add another object's counts to this one."""
        longest = max(self.longest_request_s, other.longest_request_s)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.longest_request_s = longest


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Figures that follow from finished trees: of one tree, or sums over several."""

    trajectories: int
    """Leaves."""
    lost: int
    """Planned trajectories that failed tool calls have cost."""
    forks: int
    """Trajectories that started at a fork after a tool result."""
    calls_inherited: int
    """Tool results shared with the trajectory that made the call, counted once for each further trajectory."""
    unique_tokens: int
    """Tokens, each counted once."""
    flat_tokens: int
    """Tokens of all trajectories, shared tokens counted for each of them."""
    given_tokens: int
    """Unique tokens that the model did not sample: prompts and tool results."""
    predicted_prompt_tokens: int
    """Prompt tokens that the shape predicts (`cache_prediction`)."""
    predicted_cached_tokens: int
    """Cached tokens that the shape predicts; in sums with the prefix that all prompts share."""

    @classmethod
    def of(
        cls,
        tree: RolloutTree,
        policy: BranchPolicy,
        inside_stop: Callable[[Int32Array], bool] | None = None,
        *,
        streamed: bool = False,
    ) -> "TreeStats":
        """Return the figures of a tree; `predict_tree_requests` documents the other arguments."""
        requests = predict_tree_requests(tree.grown, policy, inside_stop, streamed=streamed)
        is_tool = [segment.role is Role.TOOL for segment in tree.segments]
        calls = list[int]()  # tool results from the root to each segment
        for segment, one in zip(tree.segments, is_tool, strict=True):
            calls.append(one + (calls[segment.parent] if segment.parent >= 0 else 0))
        leaves = tree.leaves()
        return cls(
            trajectories=len(leaves),
            lost=0 if tree.lost is None else tree.lost.trajectories,
            forks=tree.forks,
            calls_inherited=sum(calls[leaf] for leaf in leaves) - sum(is_tool),
            unique_tokens=tree.unique_tokens,
            flat_tokens=tree.flat_tokens,
            given_tokens=sum(len(segment) for segment in tree.segments if segment.role is not Role.MODEL),
            predicted_prompt_tokens=sum(request.prompt_tokens for request in requests),
            predicted_cached_tokens=sum(request.cached_tokens for request in requests),
        )


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Costs of the trees of one report."""

    counts: RolloutCounts
    """Sum over all trees, including failed ones."""
    trees: int
    failed: int
    """Trees that could not be finished."""
    totals: TreeStats
    """Sums over the finished trees."""
    seconds: float
    """Wall time."""
    trees_running: int = 0
    """Most trees with a resident path (`AdmissionFigures`), looked at about once a second while trees are collected."""
    trees_waiting: int = 0
    """Most trees without one that waited for admission, counted in the same way."""

    @property
    def prefill_over_unique(self) -> float:
        """Prompt tokens that the engine computed over the tokens of the trees; the goal is at most 1.05."""
        return self.counts.prefilled_tokens / max(1, self.totals.unique_tokens)

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that the engine took from its cache."""
        return self.counts.cached_tokens / max(1, self.counts.prompt_tokens)

    @property
    def predicted_cached_share(self) -> float:
        """Share of the prompt tokens that the shape of the trees predicts to be cached."""
        return self.totals.predicted_cached_tokens / max(1, self.totals.predicted_prompt_tokens)


def rollout_stats(
    trees: Sequence[RolloutTree],
    counts: RolloutCounts,
    each: Sequence[TreeStats],
    *,
    failed: int,
    seconds: float,
    trees_running: int = 0,
    trees_waiting: int = 0,
) -> RolloutStats:
    """Combine counts with the figures of `each` finished tree; `RolloutStats` documents the others."""
    total = {field.name: sum(getattr(one, field.name) for one in each) for field in fields(TreeStats)}
    if shared := common_prefix_length([tree.prompt_ids for tree in trees]):
        total["predicted_prompt_tokens"] += shared
        total["predicted_cached_tokens"] += sum(min(shared, len(tree.prompt_ids) - 1) for tree in trees)
    return RolloutStats(counts, len(trees), failed, TreeStats(**total), seconds, trees_running, trees_waiting)


def tokens_per_second(stats: Sequence[RolloutStats]) -> float:
    """Return the tokens sampled per second, without those that came from records."""
    sampled = sum(each.counts.tokens_sampled - each.counts.tokens_recorded for each in stats)
    return sampled / max(1e-9, sum(each.seconds for each in stats))
