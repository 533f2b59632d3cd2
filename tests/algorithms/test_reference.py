"""Every built-in advantage and loss equals the float64 reference (reference.py), which imports nothing of ours."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.base import Group, LossBatch, TokenScaling
from arpo_megatron.registry import BUILTIN, ExtensionPoint, load
from arpo_megatron.tree import Role, RolloutTree
from tests.algorithms import flat, reference

BOUNDS = {"clip_low": reference.LOW, "clip_high": reference.HIGH, "dual_clip": reference.DUAL, "covariance_share": 1.0}


def test_reference_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"collections.abc", "dataclasses", "numpy"}


def test_every_built_in_advantage_and_loss_has_a_reference() -> None:
    assert {name.partition(",")[0] for name in reference.ADVANTAGES} == set(BUILTIN[ExtensionPoint.ADVANTAGE])
    assert set(reference.LOSSES) == set(BUILTIN[ExtensionPoint.LOSS])


def flattened(
    tree: RolloutTree, rewards: np.ndarray, values: dict[str, np.ndarray], factors: np.ndarray
) -> list[reference.Trajectory]:
    """Cut a tree into its trajectories; `values` are float64[tokens] in segment-index order."""
    found = []
    for row, leaf in enumerate(tree.leaves()):
        turns, states, state, writing = list[int](), list[bytes](), b"", False
        for segment in (tree.segments[index] for index in tree.path(leaf)):
            if segment.role is not Role.MODEL:
                state, writing = state + segment.token_ids.tobytes(), False
            elif len(segment):
                if not writing:
                    states.append(state)
                    state, writing = b"", True
                turns += [len(states) - 1] * len(segment)
        spots = flat.places(tree, leaf)
        columns = {name: value[spots] for name, value in values.items()}
        found.append(
            reference.Trajectory(
                float(rewards[row]), np.array(turns, int), states, weight=0.0, factor=float(factors[row]), **columns
            )
        )
    return found


def with_logprobs(tree: RolloutTree, rng: np.random.Generator) -> tuple[RolloutTree, np.ndarray]:
    """Return the tree with sampling log-probs, and these as float64[tokens]."""
    copy, columns = RolloutTree(tree.task_id, tree.prompt_ids), [np.zeros(len(tree.prompt_ids))]
    for segment in tree.segments[1:]:
        logprobs = rng.normal(-1, 0.5, len(segment)).astype(np.float32)
        known = logprobs if segment.role is Role.MODEL else None
        copy.add(segment.parent, segment.role, segment.token_ids, logprobs=known)
        columns.append(logprobs.astype(np.float64))
    return copy, np.concatenate(columns)


@pytest.mark.parametrize("name", reference.ADVANTAGES)
@given(forest=flat.forests(), kind=flat.rewards_of_any_kind, seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_advantages_are_those_of_the_reference(name: str, forest: list[RolloutTree], kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    known = [with_logprobs(tree, rng) for tree in forest]
    groups = flat.groups_of([tree for tree, _ in known], kind, rng)
    entropies = [rng.uniform(0, 3, tree.unique_tokens) for tree, _ in known]
    own, _, option = name.partition(", ")
    estimator = load(ExtensionPoint.ADVANTAGE, own)(**({option: True} if option else {}))
    factors = token_factors(estimator, groups, entropies)
    trajectories = [
        flattened(
            group.tree,
            group.rewards,
            {"new": sampled, "old": sampled, "sampling": sampled, "entropy": entropy, "advantage": 0 * sampled},
            np.ones(len(group.rewards)),
        )
        for group, (_, sampled), entropy in zip(groups, known, entropies, strict=True)
    ]
    for number, (group, found) in enumerate(zip(groups, estimator(groups), strict=True)):
        expected = reference.ADVANTAGES[name](trajectories)[number]
        for row, leaf in enumerate(group.tree.leaves()):
            spots = flat.places(group.tree, leaf)
            values = found[row] if found.ndim == 1 else found[row][flat.segments_of(group.tree)[spots]]
            np.testing.assert_allclose(values * factors[number][spots], expected[row], rtol=1e-9, atol=1e-9)


def token_factors(estimator: object, groups: list[Group], entropies: list[np.ndarray]) -> list[np.ndarray]:
    if not isinstance(estimator, TokenScaling):
        return [np.ones(group.tree.unique_tokens) for group in groups]
    trees, nothing = [group.tree for group in groups], [np.zeros(0)] * len(groups)
    batch = LossBatch(trees, nothing, nothing, nothing, nothing, nothing, nothing, entropies)
    return estimator.token_factors(batch)


@pytest.mark.parametrize("name", reference.LOSSES)
@given(case=flat.cases())
@settings(max_examples=60)
def test_losses_and_gradients_are_those_of_the_reference(name: str, case: flat.Case) -> None:
    """Credits are float32, so the comparison allows their rounding."""
    batch = case.batch
    gaps = [new - old for new, old in zip(batch.logprobs, batch.old_logprobs, strict=True)]
    assume(all(np.abs(np.nan_to_num(gap)).max(initial=0.0) < 19 for gap in gaps))  # beyond it the ratio is bounded
    trajectories, owners = list[reference.Trajectory](), list[tuple[int, np.ndarray]]()
    for number, tree in enumerate(batch.trees):
        columns = {
            "new": batch.logprobs[number],
            "old": batch.old_logprobs[number],
            "sampling": batch.sampling_logprobs[number],
            "entropy": batch.entropies[number],
            "advantage": np.zeros(tree.unique_tokens),
        }
        rows = flattened(tree, np.zeros(len(tree.leaves())), columns, batch.trajectory_weights[number])
        for row, (own, leaf) in enumerate(zip(rows, tree.leaves(), strict=True)):
            spots = flat.places(tree, leaf)
            own.advantage = flat.advantage_at(batch, number, row, spots)
            trajectories.append(own)
            owners.append((number, spots))
    assume(any(len(own.new) for own in trajectories))
    # GSPO's mean is over sequences, whatever the aggregation.
    trajectories = reference.weighted(trajectories, "sequence-mean" if name == "gspo" else case.aggregation)
    loss, slopes = 0.0, [np.zeros(tree.unique_tokens) for tree in batch.trees]
    for own, (number, spots), (value, slope) in zip(
        trajectories, owners, reference.LOSSES[name](trajectories), strict=True
    ):
        loss -= own.weight * float(value.sum())
        np.add.at(slopes[number], spots, -own.weight * slope)
    component = load(ExtensionPoint.LOSS, name)
    fields = component.__dataclass_fields__
    found, gradients = flat.tree_loss(case, component(**{key: own for key, own in BOUNDS.items() if key in fields}))
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-5)
    for gradient, slope in zip(gradients, slopes, strict=True):
        size = max(1.0, float(np.abs(slope).max(initial=0.0)))
        torch.testing.assert_close(gradient, torch.from_numpy(slope), rtol=1e-4, atol=1e-6 * size)
