"""One optimizer update of the policy: its packs, which all ranks hold, and its trees, which rank 0 holds.

Most of a minibatch's credit follows from its rewards alone and is in the packs from the start. What depends on
log-probs besides (importance weights of trajectories, sequence-level ratios) is put in here, between the passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.base import Batch as LossBatch
from arpo_megatron.algorithms.base import Group, MinibatchValue, TokenLoss, TokenScaling
from arpo_megatron.algorithms.components import make_advantage_estimator, make_policy_loss
from arpo_megatron.algorithms.credit import Loss, TreeCredit, TreeShape, check_advantages, leaf_weights, tree_credits
from arpo_megatron.algorithms.importance import trajectory_weights
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.config import JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_batch, replace_credits, split_by_tree
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import Float32Array, RolloutTree


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one update.

    Attributes:
        packs: on every rank the same ones.
        trees: on the controller those of the packs, elsewhere none.
        advantages: on the controller for each tree float64[leaves] or [leaves, segments].
        reference_logprobs: of the packs under the reference policy, from `add_reference_logprobs`; None: there is none.
    """

    packs: list[TreePack]
    trees: Sequence[RolloutTree] = ()
    advantages: Sequence[Floats] = ()
    reference_logprobs: Sequence[Float32Array] | None = None


def build_batches(scored: Sequence[ScoredTree], config: JobConfig, spec: ModelSpec) -> list[Batch]:
    """A step's minibatches: rewards of leaves -> their advantages -> credit of tokens -> packs.

    Advantages may compare all trees of the step, but those whose advantages the store has given
    (`ScoredTree.advantages`). The trees are then divided, in order, into minibatches as equal as can be; weights are
    global over each of them.
    """
    algorithm = config.algorithm
    groups = [Group(item.tree, item.rewards, item.accuracies) for item in scored]
    shapes = [TreeShape(group.tree) for group in groups]
    estimated = iter(
        make_advantage_estimator(algorithm)(
            [group for group, item in zip(groups, scored, strict=True) if item.advantages is None]
        )
    )
    found = [next(estimated) if item.advantages is None else item.advantages for item in scored]
    advantages = [
        shape.attribute(values, algorithm.shared_advantage)
        for shape, values in zip(shapes, check_advantages(shapes, found), strict=True)
    ]
    count = min(algorithm.minibatches, len(groups))
    bounds = [round(index * len(groups) / count) for index in range(count + 1)] if count else []
    minibatches = []
    for a, b in pairwise(bounds):
        trees = [group.tree for group in groups[a:b]]
        credits = tree_credits(trees, advantages[a:b], aggregation=algorithm.loss_aggregation)
        minibatches.append(Batch(pack_batch(trees, credits, config, spec), trees, advantages[a:b]))
    return minibatches


def broadcast_batches(minibatches: Sequence[Batch]) -> list[Batch]:
    """The controller's minibatches on every rank; the trees stay with the controller."""
    packs = parallel.broadcast_object([minibatch.packs for minibatch in minibatches])
    return list(minibatches) if parallel.is_rank_zero() else [Batch(own) for own in packs]


def add_reference_logprobs(actor: Actor, minibatches: Sequence[Batch]) -> list[Batch]:
    """A step's minibatches with the reference policy's log-probs of their packs (a call of all ranks, once a step)."""
    found = actor.reference_logprobs([minibatch.packs for minibatch in minibatches])
    if found is None:
        return list(minibatches)
    return [replace(each, reference_logprobs=own) for each, own in zip(minibatches, found, strict=True)]


@dataclass(frozen=True, slots=True)
class ReadyUpdate:
    """What `Actor.update` takes, and what it cannot know.

    Attributes:
        packs: with their final credits.
        old_logprobs: None where the loss needs none.
        loss: the kind of loss.
        statistics: replace those of the update.
    """

    packs: list[TreePack]
    old_logprobs: Sequence[Float32Array] | None
    loss: Loss
    statistics: dict[str, Any] = field(default_factory=dict)


def finish_credit(
    actor: Actor,
    minibatch: Batch,
    old_logprobs: Sequence[Float32Array],
    config: JobConfig,
    *,
    on_policy: bool,
    entropies: Sequence[Float32Array] = (),
) -> ReadyUpdate:
    """The part of the algorithm that needs log-probs (a call of all ranks).

    Args:
        actor: the policy.
        minibatch: from `broadcast_batches` and `add_reference_logprobs`.
        old_logprobs: of its packs under the policy of the step.
        config: the algorithm.
        on_policy: the present policy still is that of the step.
        entropies: of the packs under the policy of the step; only some parts need them.
    """
    loss, estimator = make_policy_loss(config.algorithm), make_advantage_estimator(config.algorithm)
    limited = config.algorithm.trajectory_weight_limit is not None
    scaling = estimator if isinstance(estimator, TokenScaling) else None
    if isinstance(loss, TokenLoss) and not limited and scaling is None:
        return ReadyUpdate(minibatch.packs, old_logprobs, "policy")
    known = _Known(minibatch, old_logprobs, entropies, config)
    if isinstance(loss, TokenLoss):
        batch = known.batch(old_logprobs)
        factors = None if scaling is None or not parallel.is_rank_zero() else scaling.token_factors(batch)
        credits = tree_credits(
            batch.trees,
            batch.advantages,
            aggregation=config.algorithm.loss_aggregation,
            trajectory_weights=batch.trajectory_weights,
            token_factors=factors,
        )
        statistics = _limited(batch, config.algorithm.trajectory_weight_limit)
        return ReadyUpdate(_credited(minibatch, credits).packs, old_logprobs, "policy", statistics)
    new = old_logprobs if on_policy else actor.logprobs(minibatch.packs)
    batch = known.batch(new)
    found = loss.value(batch) if parallel.is_rank_zero() else MinibatchValue(0.0, [])
    # Ratios and loss are those of the whole minibatch: only the controller knows them, and only it reports.
    # They follow from log-probs of earlier passes; that this pass computes the same shows in its kl_old.
    packs = _credited(minibatch, found.credits).packs
    statistics = {**found.statistics, **_limited(batch, config.algorithm.trajectory_weight_limit)}
    return ReadyUpdate(packs, old_logprobs, "linear", statistics)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the controller can say of a minibatch; on other ranks of no trees."""

    minibatch: Batch
    old_logprobs: Sequence[Float32Array]
    entropies: Sequence[Float32Array]
    config: JobConfig

    def batch(self, logprobs: Sequence[Float32Array]) -> LossBatch:
        """With `logprobs`, a pack each, as those of the present policy."""
        packs, trees = self.minibatch.packs, self.minibatch.trees
        algorithm = self.config.algorithm
        old = self._by_tree(self.old_logprobs)
        sampling = self._by_tree([pack.sampling_logprobs for pack in packs])
        shapes = [TreeShape(tree) for tree in trees]
        factors = [np.ones(len(shape.leaves)) for shape in shapes]
        if (limit := algorithm.trajectory_weight_limit) is not None:
            apart = [a - b for a, b in zip(old, sampling, strict=True)]
            factors = trajectory_weights(trees, apart, limit=limit)
        return LossBatch(
            trees=trees,
            advantages=self.minibatch.advantages,
            weights=leaf_weights(shapes, algorithm.loss_aggregation, factors),
            trajectory_weights=factors,
            old_logprobs=old,
            logprobs=self._by_tree(logprobs),
            sampling_logprobs=sampling,
            entropies=self._by_tree(self.entropies or [np.full_like(own, np.nan) for own in self.old_logprobs]),
        )

    def _by_tree(self, values: Sequence[Float32Array]) -> list[Floats]:
        return split_by_tree(self.minibatch.packs, values, self.minibatch.trees) if self.minibatch.trees else []


def _limited(batch: LossBatch, limit: float | None) -> dict[str, float]:
    """How many trajectories met the limit of their importance weights; nothing where there is none, or no trees."""
    if limit is None or not batch.trees:
        return {}
    return {"weights_limited": float(np.mean(np.concatenate(batch.trajectory_weights) >= limit))}


def _credited(minibatch: Batch, credits: Sequence[TreeCredit]) -> Batch:
    """The same packs with the controller's new credits, on every rank."""
    packs = replace_credits(minibatch.packs, credits) if parallel.is_rank_zero() else None
    return replace(minibatch, packs=parallel.broadcast_object(packs))
