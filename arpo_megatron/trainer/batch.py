"""Batches of trees: from rewards to the packs of one update.

Most credit follows from rewards alone and is in the packs from the start. Credit that depends on log-probs (importance
weights of trajectories, ratios of sequences) is added by `finish_credit` between the passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor, PolicyOutputs
from arpo_megatron.algorithms.base import (
    BatchValue,
    Counterfactual,
    Group,
    LossBatch,
    Tempered,
    TokenLoss,
    TokenScaling,
)
from arpo_megatron.algorithms.components import make_advantage_estimator, make_policy_loss, sampling_correction
from arpo_megatron.algorithms.credit import (
    LossForm,
    TreeCredit,
    TreeShape,
    check_advantages,
    leaf_weights,
    scale_credits,
    supervised_credit,
    tree_credits,
)
from arpo_megatron.algorithms.importance import Correction, SamplingWeights, sampling_weights
from arpo_megatron.algorithms.turns import turns
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.tree_store import TrainedTree
from arpo_megatron.packing.layout import TreePack, drop_routes
from arpo_megatron.packing.packs import pack_batch, replace_credits, split_by_tree
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import Float32Array, RolloutTree


@dataclass(frozen=True, slots=True)
class Batch:
    """The packs and trees of one update."""

    packs: list[TreePack]
    """Packs of the update, the same on every rank."""
    trees: Sequence[RolloutTree] = ()
    """Trees of the packs, on rank 0."""
    advantages: Sequence[Floats] = ()
    """For each tree float64[leaves] or [leaves, segments], on rank 0."""
    reference_logprobs: Sequence[Float32Array] | None = None
    """Log-probs of the packs under the reference policy; None without a KL penalty."""
    turn: int = 0
    """The turn that is updated (`LossBatch.turn`). The batches of one group of trees have the same packs."""


def counterfactual_advantages(
    actor: Actor,
    scored: Sequence[ScoredTree],
    config: JobConfig,
    masked: Callable[[], Sequence[int]] | None,
    prepare: Callable[[Sequence[TreePack]], None],
) -> list[Floats] | None:
    """Return the advantages of an estimator that needs log-probs in other contexts; all ranks call it.

    Args:
        actor: the policy of the step.
        scored: the step's trees, on rank 0.
        config: the job.
        masked: returns the tokens of a tool result without content, on rank 0; None elsewhere.
        prepare: compiles the attention of packs; all ranks call it.

    Returns:
        Advantages of the trees without those of a replay buffer, for `build_batches`, on rank 0; None elsewhere, and
        for other estimators.
    """
    estimator = make_advantage_estimator(config.algorithm)
    if not isinstance(estimator, Counterfactual):
        return None
    groups = _groups([item for item in scored if item.advantages is None])
    contexts = [] if masked is None else estimator.contexts(groups, masked())
    own = pack_batch(contexts, supervised_credit(contexts), config, actor.spec) if contexts else []
    packs = parallel.broadcast_object([drop_routes(pack) for pack in own])
    prepare(packs)
    logprobs = actor.logprobs(packs, training=False)
    return estimator.credit(groups, contexts, split_by_tree(packs, logprobs, contexts)) if contexts else None


def _groups(scored: Sequence[ScoredTree]) -> list[Group]:
    return [Group(item.tree, item.rewards, item.accuracies) for item in scored]


def build_batches(
    scored: Sequence[ScoredTree], config: JobConfig, spec: ModelSpec, estimates: Sequence[Floats] | None = None
) -> list[Batch]:
    """Turn the trees of a step into batches: rewards -> advantages -> credit of tokens -> packs.

    Advantages may compare all trees of the step, except those that the replay buffer has given
    (`ScoredTree.advantages`). The trees are then divided, in order, into `algorithm.minibatches` batches of nearly
    equal size. Token weights are global over a batch. A loss with `turn_by_turn` gets several batches of the same
    trees.

    Args:
        scored: the trees.
        config: the job.
        spec: sizes of the model.
        estimates: from `counterfactual_advantages`; None: the estimator needs rewards only.
    """
    algorithm, groups = config.algorithm, _groups(scored)
    shapes = [TreeShape(group.tree) for group in groups]
    if estimates is None:
        estimates = make_advantage_estimator(algorithm)(_groups([item for item in scored if item.advantages is None]))
    estimated = iter(estimates)
    raw = [next(estimated) if item.advantages is None else item.advantages for item in scored]
    advantages = [
        shape.apply_shared_advantage(values, algorithm.shared_advantage)
        for shape, values in zip(shapes, check_advantages(shapes, raw), strict=True)
    ]
    count = min(algorithm.minibatches, len(groups))
    bounds = [round(index * len(groups) / count) for index in range(count + 1)] if count else []
    batches = []
    for a, b in pairwise(bounds):
        trees = [group.tree for group in groups[a:b]]
        credits = tree_credits(trees, advantages[a:b], aggregation=algorithm.loss_aggregation)
        first = Batch(pack_batch(trees, credits, config, spec), trees, advantages[a:b])
        batches += [replace(first, turn=turn) for turn in range(_updates(trees, algorithm))]
    return batches


def _updates(trees: Sequence[RolloutTree], algorithm: AlgorithmConfig) -> int:
    """Return the number of updates with these trees: one, or one for each turn of the longest trajectory."""
    if not getattr(make_policy_loss(algorithm), "turn_by_turn", False):
        return 1
    return max(1, *(len(turns(tree, leaf)) for tree in trees for leaf in tree.leaves()))


def broadcast_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Return rank 0's batches on every rank; the trees stay on rank 0."""
    packs = parallel.broadcast_object([(batch.packs, batch.turn) for batch in batches])
    return list(batches) if parallel.is_rank_zero() else [Batch(own, turn=turn) for own, turn in packs]


def add_reference_logprobs(actor: Actor, batches: Sequence[Batch]) -> list[Batch]:
    """Add the reference policy's log-probs to the batches of a step; all ranks call it, once a step."""
    logprobs = actor.reference_logprobs([batch.packs for batch in batches])
    if logprobs is None:
        return list(batches)
    return [replace(batch, reference_logprobs=own) for batch, own in zip(batches, logprobs, strict=True)]


def step_outputs(actor: Actor, batches: Sequence[Batch], config: JobConfig) -> list[PolicyOutputs]:
    """Return log-probs and entropies of a step's batches under the present policy; all ranks call it."""
    outputs = list[PolicyOutputs]()
    for batch in batches:
        outputs.append(outputs[-1] if batch.turn else actor.policy_outputs(batch.packs))
    loss = make_policy_loss(config.algorithm)
    entropies = [values for own in outputs for values in own.entropies]
    if not isinstance(loss, Tempered) or not entropies:
        return outputs
    # The same on all ranks, which must agree on the temperature.
    temperature = config.rollout.temperature * loss.temperature(float(np.concatenate(entropies).mean(dtype=np.float64)))
    return [
        replace(own, tempered_logprobs=actor.logprobs(batch.packs, temperature=temperature))
        for own, batch in zip(outputs, batches, strict=True)
    ]


def trained_trees(batches: Sequence[Batch], outputs: Sequence[PolicyOutputs]) -> list[TrainedTree]:
    """Return advantages and log-probs of the step's trees, in their order, for the stored trees; rank 0 only.

    Args:
        batches: from `build_batches`.
        outputs: of their packs under the policy that the step began with.
    """
    return [
        TrainedTree(advantages, logprobs)
        for batch, own in zip(batches, outputs, strict=True)
        if not batch.turn
        for advantages, logprobs in zip(
            batch.advantages, split_by_tree(batch.packs, own.logprobs, batch.trees), strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class ReadyUpdate:
    """Arguments of `Actor.update`, and statistics that it cannot know."""

    packs: list[TreePack]
    """Packs with their final credits."""
    old_logprobs: Sequence[Float32Array] | None
    loss: LossForm
    statistics: dict[str, Any] = field(default_factory=dict)
    """Values by metric, which replace those of the update."""


def finish_credit(
    actor: Actor,
    batch: Batch,
    old_logprobs: Sequence[Float32Array],
    config: JobConfig,
    *,
    on_policy: bool,
    entropies: Sequence[Float32Array] = (),
    tempered_logprobs: Sequence[Float32Array] = (),
) -> ReadyUpdate:
    """Compute the credits that depend on log-probs; all ranks call it.

    Args:
        actor: the policy.
        batch: with its reference log-probs.
        old_logprobs: of its packs under the policy of the step.
        config: the algorithm.
        on_policy: the actor still is the policy of the step.
        entropies: of the packs under the policy of the step; only some algorithms need them.
        tempered_logprobs: `PolicyOutputs.tempered_logprobs`.
    """
    loss, estimator = make_policy_loss(config.algorithm), make_advantage_estimator(config.algorithm)
    correction = sampling_correction(config)
    scaling = estimator if isinstance(estimator, TokenScaling) else None
    if isinstance(loss, TokenLoss) and correction == "none" and scaling is None:
        return ReadyUpdate(batch.packs, old_logprobs, "policy")
    weights = _sampling_weights(batch, old_logprobs, correction, config)
    if isinstance(loss, TokenLoss):
        inputs = _loss_batch(batch, old_logprobs, old_logprobs, entropies, config, weights)
        factors = None if scaling is None or not parallel.is_rank_zero() else scaling.token_factors(inputs)
        credits = tree_credits(
            inputs.trees,
            inputs.advantages,
            aggregation=config.algorithm.loss_aggregation,
            trajectory_weights=inputs.trajectory_weights,
            token_factors=factors,
        )
        return ReadyUpdate(_with_credits(batch, credits, weights), old_logprobs, "policy", {**weights.statistics})
    new = old_logprobs if on_policy else actor.logprobs(batch.packs)
    inputs = _loss_batch(batch, old_logprobs, new, entropies, config, weights, tempered_logprobs)
    # Ratios and loss cover the whole batch, so rank 0 alone computes and reports them. They come from the log-probs of
    # earlier passes; kl_old of this pass shows whether it computes the same.
    value = loss.value(inputs) if parallel.is_rank_zero() else BatchValue(0.0, [])
    statistics = {**value.statistics, **weights.statistics}
    return ReadyUpdate(_with_credits(batch, value.credits, weights), old_logprobs, "linear", statistics)


def _sampling_weights(
    batch: Batch, old_logprobs: Sequence[Float32Array], correction: Correction, config: JobConfig
) -> SamplingWeights:
    """Return the importance weights of a batch; without trees (on other ranks than 0) all lists are empty."""
    sampled = [pack.sampling_logprobs for pack in batch.packs]
    log_ratios = [a - b for a, b in zip(old_logprobs, sampled, strict=True)]
    return sampling_weights(
        batch.trees,
        split_by_tree(batch.packs, log_ratios, batch.trees) if batch.trees else [],
        correction,
        low=config.algorithm.sampling_ratio_min,
        high=config.algorithm.sampling_ratio_max,
    )


def _loss_batch(
    batch: Batch,
    old_logprobs: Sequence[Float32Array],
    logprobs: Sequence[Float32Array],
    entropies: Sequence[Float32Array],
    config: JobConfig,
    weights: SamplingWeights,
    tempered_logprobs: Sequence[Float32Array] = (),
) -> LossBatch:
    """Arrange values by tree; without trees (on other ranks than 0) all lists are empty."""
    trees = batch.trees

    def by_tree(values: Sequence[Float32Array]) -> list[Floats]:
        return split_by_tree(batch.packs, values, trees) if trees else []

    old, sampling = by_tree(old_logprobs), by_tree([pack.sampling_logprobs for pack in batch.packs])
    shapes = [TreeShape(tree) for tree in trees]
    return LossBatch(
        trees=trees,
        advantages=batch.advantages,
        weights=leaf_weights(shapes, config.algorithm.loss_aggregation, weights.leaves),
        trajectory_weights=weights.leaves,
        old_logprobs=old,
        logprobs=by_tree(logprobs),
        sampling_logprobs=sampling,
        entropies=by_tree(entropies or [np.full_like(own, np.nan) for own in old_logprobs]),
        tempered_logprobs=by_tree(tempered_logprobs) if tempered_logprobs else (),
        turn=batch.turn,
    )


def _with_credits(batch: Batch, credits: Sequence[TreeCredit], weights: SamplingWeights) -> list[TreePack]:
    """Return the packs with rank 0's new credits times the weights of tokens, on every rank."""
    scaled = scale_credits(credits, weights.tokens) if parallel.is_rank_zero() else None
    return replace_credits(batch.packs, parallel.broadcast_object(scaled))
