"""The methods on flattened trajectories, in float64, written from their papers without any sharing.

Every trajectory is a copy of its own: a token that several hold appears in each of them. Gradients are autograd's, with
regard to one table of log-probs a tree, so that copies of a shared token add up there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from arpo_megatron.algorithms.base import BatchLoss, Group, LossBatch, LossTokens
from arpo_megatron.algorithms.credit import TreeShape, leaf_weights, tree_credits
from arpo_megatron.tree import Role, RolloutTree

TokenTerm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(logprobs, ratio, entropies, advantage) of one trajectory's tokens -> the objective of each of them."""


def places(tree: RolloutTree, leaf: int) -> np.ndarray:
    """Return the positions of a trajectory's MODEL tokens in segment-index order."""
    starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
    parts = [np.arange(starts[s], starts[s + 1]) for s in tree.path(leaf) if tree.segments[s].role is Role.MODEL]
    return np.concatenate([np.zeros(0, int), *parts])


def segments_of(tree: RolloutTree) -> np.ndarray:
    return np.repeat(np.arange(len(tree.segments)), [len(segment) for segment in tree.segments])


@st.composite
def forests(draw: st.DrawFn, most: int = 3) -> list[RolloutTree]:
    """Draw trees of any shape: with one leaf, segments without tokens, trajectories without model tokens."""
    trees = []
    for number in range(draw(st.integers(1, most))):
        tree = RolloutTree(f"task-{number}", range(draw(st.integers(1, 3))))
        for index in range(draw(st.integers(1, 9))):
            role = draw(st.sampled_from([Role.MODEL, Role.MODEL, Role.TOOL]))
            tree.add(draw(st.integers(0, index)), role, range(draw(st.integers(0, 4))))
        trees.append(tree)
    return trees


rewards_of_any_kind = st.sampled_from(["binary", "equal", "real"])


def groups_of(trees: Sequence[RolloutTree], kind: str, rng: np.random.Generator) -> list[Group]:
    found = []
    for tree in trees:
        count = len(tree.leaves())
        values = {
            "binary": rng.integers(0, 2, count).astype(float),
            "equal": np.full(count, 0.1),
            "real": rng.normal(0, 1, count),
        }[kind]
        found.append(Group(tree, values, np.clip(values, 0, 1)))
    return found


@dataclass(frozen=True)
class Case:
    """A batch with log-probs and entropies of all its tokens, and advantages by leaf or by segment."""

    batch: LossBatch
    aggregation: str
    parameters: list[Tensor]  # the log-probs, as leaves of autograd
    entropies: list[Tensor]  # in the training pass


@st.composite
def cases(draw: st.DrawFn, *, by_segment: bool | None = None) -> Case:
    trees = draw(forests())
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.0, 0.05, 0.5, 3.0, 40.0]))  # the last one is beyond every bound
    segments = draw(st.booleans()) if by_segment is None else by_segment
    advantages = [rng.normal(0, 1, (len(t.leaves()), len(t.segments)) if segments else len(t.leaves())) for t in trees]
    aggregation = draw(st.sampled_from(["token-mean", "sequence-mean"]))
    shapes = [TreeShape(tree) for tree in trees]
    factors = [rng.uniform(0, 2, len(shape.leaves)) for shape in shapes]
    model = [shape.spread(shape.is_model.astype(float)) > 0 for shape in shapes]

    def known(values: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.where(where, values, np.nan)

    old = [known(rng.normal(-1, 0.3, len(m)), m) for m in model]
    new = [o + rng.normal(0, spread, len(o)) for o in old]
    entropies = [known(rng.uniform(0, 3, len(m)), m) for m in model]
    batch = LossBatch(
        trees=trees,
        advantages=advantages,
        weights=leaf_weights(shapes, aggregation, factors),
        trajectory_weights=factors,
        old_logprobs=old,
        logprobs=new,
        sampling_logprobs=[o + rng.normal(0, 0.1, len(o)) for o in old],
        entropies=entropies,
        tempered_logprobs=[o + rng.normal(0, 0.3, len(o)) for o in old],
    )
    parameters = [torch.from_numpy(np.nan_to_num(n)).requires_grad_() for n in new]
    return Case(batch, aggregation, parameters, [torch.from_numpy(np.nan_to_num(e)) for e in entropies])


def advantage_at(batch: LossBatch, number: int, row: int, spots: np.ndarray) -> np.ndarray:
    """Return float64[tokens] of one trajectory."""
    given = batch.advantages[number][row]
    return np.full(len(spots), given) if given.ndim == 0 else given[segments_of(batch.trees[number])[spots]]


def flat_loss(case: Case, term: TokenTerm, scale: Sequence[np.ndarray] | None = None) -> Tensor:
    """Return -sum_i w_i sum_t term, trajectory by trajectory; `scale` multiplies advantages token by token."""
    batch, total = case.batch, torch.zeros((), dtype=torch.float64)
    for number, tree in enumerate(batch.trees):
        for row, leaf in enumerate(tree.leaves()):
            spots = places(tree, leaf)
            new = case.parameters[number][spots]
            old = torch.from_numpy(batch.old_logprobs[number])[spots]
            advantages = advantage_at(batch, number, row, spots)
            if scale is not None:
                advantages = advantages * scale[number][spots]
            ratio = (new - old).clamp(-20, 20).exp()
            for t in range(len(spots)):  # token by token, like the sum in the paper
                one = slice(t, t + 1)
                value = term(new[one], ratio[one], case.entropies[number][spots][one], float(advantages[t]))
                total = total - batch.weights[number][row] * value.sum()
    return total


def flat_weights(case: Case, term: Callable[[Tensor], Tensor]) -> Tensor:
    """Return sum_i w_i sum_t term(ratio), trajectory by trajectory."""
    batch, total = case.batch, torch.zeros((), dtype=torch.float64)
    for number, tree in enumerate(batch.trees):
        for row, leaf in enumerate(tree.leaves()):
            spots = places(tree, leaf)
            old = torch.from_numpy(batch.old_logprobs[number])[spots]
            ratio = (case.parameters[number][spots] - old).clamp(-20, 20).exp()
            total = total + batch.weights[number][row] * term(ratio).sum()
    return total


def tree_loss(case: Case, loss: object, scale: Sequence[np.ndarray] | None = None) -> tuple[float, list[Tensor]]:
    """Return the loss on the tree, and its gradients with respect to each tree's log-probs."""
    batch = case.batch
    if isinstance(loss, BatchLoss):
        found = loss.value(batch)
        coefficients = [c.positive.astype(np.float64) + c.negative for c in found.credits]
        return found.loss, [-torch.from_numpy(c) for c in coefficients]
    credits = tree_credits(
        batch.trees,
        batch.advantages,
        aggregation=case.aggregation,
        trajectory_weights=batch.trajectory_weights,
        token_factors=scale,
    )
    total = torch.zeros((), dtype=torch.float64)
    for number, credit in enumerate(credits):
        model = torch.from_numpy(~np.isnan(batch.old_logprobs[number]))
        new = case.parameters[number][model]
        old = torch.from_numpy(batch.old_logprobs[number])[model]
        pos, neg, weight = (
            torch.from_numpy(getattr(credit, name).astype(np.float64))[model]
            for name in ("positive", "negative", "weight")
        )
        ratio = (new - old).clamp(-20, 20).exp()
        factors = loss.factors(LossTokens(new, ratio, case.entropies[number][model], pos, neg, weight))
        total = total - (pos * factors.gain + neg * factors.cost).sum()
        if factors.penalty is not None:
            total = total + (weight * factors.penalty).sum()
    return float(total.detach()), gradients(total, case)


def gradients(total: Tensor, case: Case) -> list[Tensor]:
    if not total.requires_grad:
        return [torch.zeros_like(p) for p in case.parameters]
    found = torch.autograd.grad(total, case.parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(case.parameters, found, strict=True)]


def assert_same(case: Case, loss: object, exact: Tensor, scale: Sequence[np.ndarray] | None = None) -> None:
    """Compare loss and every gradient; credits are float32."""
    value, found = tree_loss(case, loss, scale)
    size = max(1.0, abs(float(exact.detach())))
    assert abs(value - float(exact.detach())) <= 1e-5 * size, (value, float(exact.detach()))
    for own, expected in zip(found, gradients(exact, case), strict=True):
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6 * max(1.0, largest))
