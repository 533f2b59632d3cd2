"""The engine requests that finished trees must have taken, and the cached tokens that their shape guarantees.

The engine reports what its radix cache really served. It serves less only if something is wrong: evicted prefixes, a
lost prefill, repeated requests, or weight pushes, which empty the cache. It serves more if trajectories have sampled
equal tokens by chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arpo_megatron.algorithms.branching import BranchPolicy, ProbingPolicy
from arpo_megatron.rollout.shared_prefixes import common_prefix_length
from arpo_megatron.tree import Int32Array, Role, RolloutTree


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """Predicted size and cache hits of one engine request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that an earlier request of the same path or fork point has put into the cache."""


def predict_requests(
    trees: Sequence[RolloutTree], policy: BranchPolicy, inside_stop: Callable[[Int32Array], bool] | None = None
) -> list[PredictedRequest]:
    """Return the requests for trees that grew together from an empty cache, without a weight push in between.

    The requests are, in this order:

    - one for the prefix that all prompts share
    - one for each prompt from which several trajectories start
    - one for each MODEL segment; two if a branching decision was taken after its first k tokens
    - one for each token that was sampled alone because those k tokens ended inside a tag

    The cache holds the tokens that were fed to the model: all but the last one that a request samples. The last token
    of a prompt is always computed, because its logits are needed.

    Args:
        trees: finished trees.
        policy: the policy with which they grew.
        inside_stop: whether a segment's tokens so far end inside a stop string (see `ends_inside_stop`); None: never,
            as if every tag were a single token.
    """
    shared = common_prefix_length([tree.prompt_ids for tree in trees])
    requests = [PredictedRequest(shared, 0)] if shared else []
    for tree in trees:
        requests += predict_tree_requests(tree, policy, inside_stop, shared=shared)
    return requests


def predict_tree_requests(
    tree: RolloutTree,
    policy: BranchPolicy,
    inside_stop: Callable[[Int32Array], bool] | None = None,
    *,
    shared: int = 0,
    streamed: bool = False,
) -> list[PredictedRequest]:
    """Return the requests for one tree, in time linear in its tokens.

    A `shared` of n tokens instead of none makes min(n, prompt tokens - 1) more tokens cached.

    Args:
        tree: see `predict_requests`.
        policy: see `predict_requests`.
        inside_stop: see `predict_requests`.
        shared: length of the prefix that is in the cache before.
        streamed: decisions were taken while the engine sampled, so a MODEL segment is one request.
    """
    requests: list[PredictedRequest] = []

    def predict(prompt_tokens: int, cached_tokens: int) -> None:
        requests.append(PredictedRequest(prompt_tokens, min(cached_tokens, prompt_tokens - 1)))

    prefilled = policy.initial > 1 and not isinstance(policy, ProbingPolicy)  # a probe itself fills the cache
    if prefilled:
        predict(len(tree.prompt_ids), shared)
    started: set[int] = set()  # segments below which a request has been sent
    ends: list[int] = []  # tokens from the root to the end of each segment
    for segment in tree.segments:
        before = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(before + len(segment))
        if segment.role is not Role.MODEL:
            continue
        parent = tree.segments[segment.parent]
        if parent.role is Role.MODEL:
            cached = 0  # a weight push cut the segment before short, and emptied the cache
        elif segment.parent in started:
            cached = before
        elif parent.role is Role.PROMPT:
            cached = before if prefilled else shared
        else:  # the tool result and the last sampled token before it are new
            cached = before - len(parent) - 1
        started.add(segment.parent)
        predict(before, cached)
        sampled = len(segment) if segment.branch is None or streamed else policy.measured_tokens
        while sampled < len(segment):
            predict(before + sampled, before + sampled - 1)
            alone = inside_stop is not None and inside_stop(segment.token_ids[:sampled])
            sampled = sampled + 1 if alone else len(segment)
    return requests
