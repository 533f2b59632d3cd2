"""One optimizer update of the policy: the packs that all ranks hold, and the trees behind them that the leader holds.

Most of a minibatch's credit follows from its rewards alone and is in the packs from the start. What depends on
log-probs besides (importance weights of trajectories, sequence-level ratios) is put in here, between the passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.layout import TreePack
from arpo_megatron.actor.packing import by_tree, pack_minibatch, with_credits
from arpo_megatron.algorithms.advantages import group_advantages
from arpo_megatron.algorithms.credit import Loss, TreeCredit, tree_credits
from arpo_megatron.algorithms.sequence_ratio import gspo, trajectory_weights
from arpo_megatron.config import JobConfig
from arpo_megatron.tree import Float32Array, RolloutTree
from arpo_megatron.tree_files import ScoredTree
from arpo_megatron.weights.shape import ModelShape

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Of one update.

    Attributes:
        packs: on every rank the same ones.
        trees: on the leader those of the packs, elsewhere none.
        advantages: on the leader for each tree float64[leaves].
        reference_logprobs: of the packs under the reference policy, from `with_reference`; None: there is none.
    """

    packs: list[TreePack]
    trees: Sequence[RolloutTree] = ()
    advantages: Sequence[_Floats] = ()
    reference_logprobs: Sequence[Float32Array] | None = None

    @classmethod
    def of(cls, scored: Sequence[ScoredTree], config: JobConfig, shape: ModelShape) -> Self:
        """Rewards of the leaves -> their advantages -> credit of the tokens -> packs."""
        trees = [item.tree for item in scored]
        advantages = [group_advantages(item.rewards) for item in scored]
        packs = pack_minibatch(trees, _credits(trees, advantages, config), config, shape)
        return cls(packs, trees, advantages)


def share(minibatches: Sequence[Minibatch]) -> list[Minibatch]:
    """The leader's minibatches on every rank; the trees stay with the leader."""
    packs = parallel.broadcast_object([minibatch.packs for minibatch in minibatches])
    return list(minibatches) if parallel.is_leader() else [Minibatch(own) for own in packs]


def with_reference(actor: Actor, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
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


def prepare_update(
    actor: Actor, minibatch: Minibatch, old_logprobs: Sequence[Float32Array], config: JobConfig, *, on_policy: bool
) -> ReadyUpdate:
    """The part of the algorithm that needs log-probs (a call of all ranks).

    Args:
        actor: the policy.
        minibatch: from `share` and `with_reference`.
        old_logprobs: of its packs under the policy of the step.
        config: the algorithm.
        on_policy: the present policy still is that of the step.
    """
    weights = None
    if (limit := config.algorithm.trajectory_weight_limit) is not None:
        weights = _trajectory_weights(minibatch, old_logprobs, limit)
        minibatch = _credited(minibatch, _credits(minibatch.trees, minibatch.advantages, config, weights))
    if config.algorithm.ratio == "token":
        return ReadyUpdate(minibatch.packs, old_logprobs, "ppo")
    new = old_logprobs if on_policy else actor.logprobs(minibatch.packs)
    differences = [a - b for a, b in zip(new, old_logprobs, strict=True)]
    found = gspo(
        minibatch.trees,
        minibatch.advantages,
        by_tree(minibatch.packs, differences, minibatch.trees) if minibatch.trees else [],
        clip_low=config.algorithm.clip_low,
        clip_high=config.algorithm.clip_high,
        trajectory_weights=weights,
    )
    # Ratios and loss are those of trajectories: only the leader knows them, and only it reports.
    # Their ratios follow from log-probs of earlier passes; that this pass computes the same shows in its kl_old.
    packs = _credited(minibatch, found.credits).packs
    return ReadyUpdate(packs, old_logprobs, "linear", statistics=found.statistics())


def _credits(
    trees: Sequence[RolloutTree],
    advantages: Sequence[_Floats],
    config: JobConfig,
    weights: Sequence[_Floats] | None = None,
) -> list[TreeCredit]:
    algorithm = config.algorithm
    return tree_credits(
        trees,
        advantages,
        aggregation=algorithm.aggregation,
        attribution=algorithm.attribution,
        trajectory_weights=weights,
    )


def _credited(minibatch: Minibatch, credits: Sequence[TreeCredit]) -> Minibatch:
    """The same packs with the leader's new credits, on every rank."""
    packs = with_credits(minibatch.packs, credits) if parallel.is_leader() else None
    return replace(minibatch, packs=parallel.broadcast_object(packs))


def _trajectory_weights(minibatch: Minibatch, old_logprobs: Sequence[Float32Array], limit: float) -> list[_Floats]:
    if not minibatch.trees:
        return []
    differences = [old - pack.sampling_logprobs for pack, old in zip(minibatch.packs, old_logprobs, strict=True)]
    return trajectory_weights(minibatch.trees, by_tree(minibatch.packs, differences, minibatch.trees), limit=limit)
