"""Every built-in advantage and loss equals the float64 reference (reference.py), which imports nothing of ours."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.base import Counterfactual, Group, LossBatch, TokenScaling
from arpo_megatron.algorithms.losses.seeupo import SeeUpo
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
    paths = [flat.places(tree, leaf).tolist() for leaf in tree.leaves()]
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
        columns["places"] = spots
        columns["gains"] = np.full(len(states), np.nan)
        columns["holders"] = np.array([sum(spot in path for path in paths) for spot in spots], int)
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
            dict.fromkeys(("new", "old", "sampling", "tempered"), sampled)
            | {"entropy": entropy, "advantage": 0 * sampled},
            np.ones(len(group.rewards)),
        )
        for group, (_, sampled), entropy in zip(groups, known, entropies, strict=True)
    ]
    if isinstance(estimator, Counterfactual):
        contexts = estimator.contexts(groups, [7, 8])
        logprobs = [rng.normal(-1, 1, context.unique_tokens) for context in contexts]
        for rows, group, context, logs in zip(trajectories, groups, contexts, logprobs, strict=True):
            set_gains(rows, group.tree, context, logs)
        advantages = estimator.credit(groups, contexts, logprobs)
    else:
        advantages = estimator(groups)
    for number, (group, found) in enumerate(zip(groups, advantages, strict=True)):
        expected = reference.ADVANTAGES[name](trajectories)[number]
        for row, leaf in enumerate(group.tree.leaves()):
            spots = flat.places(group.tree, leaf)
            values = found[row] if found.ndim == 1 else found[row][flat.segments_of(group.tree)[spots]]
            np.testing.assert_allclose(values * factors[number][spots], expected[row], rtol=1e-9, atol=1e-9)


def set_gains(rows: list[reference.Trajectory], tree: RolloutTree, context: RolloutTree, logs: np.ndarray) -> None:
    """Set the gains of all turns, given log-probs of the context tree.

    It has the segments of the tree, then for each tool result after a MODEL segment an empty result and copies of the
    MODEL segments that followed.
    """
    segments = tree.segments
    followers = [
        [n for n, own in enumerate(segments) if own.parent == result and own.role is Role.MODEL and len(own)]
        for result, segment in enumerate(segments)
        if segment.role is Role.TOOL and segments[segment.parent].role is Role.MODEL
    ]
    ends = np.cumsum([len(segment) for segment in context.segments])
    means, place = {}, len(segments)
    for copied in filter(None, followers):
        assert context.segments[place].token_ids.tolist() == [7, 8]
        assert context.segments[place].parent == segments[segments[copied[0]].parent].parent
        for number in copied:
            place += 1
            assert context.segments[place].token_ids.tolist() == segments[number].token_ids.tolist()
            count = len(segments[number])
            means[number] = (
                logs[ends[number] - count : ends[number]].mean() - logs[ends[place] - count : ends[place]].mean()
            )
        place += 1
    assert place == len(context.segments)
    for own, leaf in zip(rows, tree.leaves(), strict=True):
        starts, writing = list[int](), False  # the first segment of every turn
        pending: int | None = None
        for number in tree.path(leaf):
            if segments[number].role is not Role.MODEL:
                writing, pending = False, None
                continue
            pending = number if pending is None else pending
            if len(segments[number]) and not writing:
                starts.append(pending)
                writing = True
        for turn, following in enumerate(starts[1:]):
            own.gains[turn] = means.get(following, np.nan)


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
    # GSPO's mean is over sequences, whatever the aggregation.
    aggregation = "sequence-mean" if name == "gspo" else case.aggregation
    component = load(ExtensionPoint.LOSS, name)
    fields = component.__dataclass_fields__
    loss = component(**{key: own for key, own in BOUNDS.items() if key in fields})
    assert_terms(case, loss, reference.LOSSES[name], aggregation)


@pytest.mark.parametrize("back", [1, 2])
@given(case=flat.cases())
@settings(max_examples=60)
def test_seeupo_corrects_earlier_turns_for_the_updates_of_later_ones(back: int, case: flat.Case) -> None:
    gaps = [new - old for new, old in zip(case.batch.logprobs, case.batch.old_logprobs, strict=True)]
    assume(all(np.abs(np.nan_to_num(gap)).max(initial=0.0) < 4 for gap in gaps))  # the product is bounded, too
    case = replace(case, batch=replace(case.batch, turn=back))
    terms = reference.each(lambda own: reference.seeupo(own, back))
    assert_terms(case, SeeUpo(reference.LOW, reference.HIGH), terms, case.aggregation)


def assert_terms(case: flat.Case, loss: object, terms: reference.LossReference, aggregation: str) -> None:
    """Compare value and gradient. Credits are float32, so the comparison allows their rounding."""
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
            "tempered": batch.tempered_logprobs[number],
            "advantage": np.zeros(tree.unique_tokens),
        }
        rows = flattened(tree, np.zeros(len(tree.leaves())), columns, batch.trajectory_weights[number])
        for row, (own, leaf) in enumerate(zip(rows, tree.leaves(), strict=True)):
            spots = flat.places(tree, leaf)
            own.advantage = flat.advantage_at(batch, number, row, spots)
            own.places = own.places + 10**6 * number
            trajectories.append(own)
            owners.append((number, spots))
    assume(any(len(own.new) for own in trajectories))
    trajectories = reference.weighted(trajectories, aggregation)
    total, slopes = 0.0, [np.zeros(tree.unique_tokens) for tree in batch.trees]
    for own, (number, spots), (value, slope) in zip(trajectories, owners, terms(trajectories), strict=True):
        total -= own.weight * float(value.sum())
        np.add.at(slopes[number], spots, -own.weight * slope)
    found, gradients = flat.tree_loss(case, loss)
    assert found == pytest.approx(total, rel=1e-5, abs=1e-5)
    for gradient, slope in zip(gradients, slopes, strict=True):
        size = max(1.0, float(np.abs(slope).max(initial=0.0)))
        torch.testing.assert_close(gradient, torch.from_numpy(slope), rtol=1e-4, atol=1e-6 * size)
