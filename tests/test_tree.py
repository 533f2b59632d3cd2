"""The tree keeps its promises for every tree that can be grown."""

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.tree import BranchRecord, Finish, Role, RolloutTree, Segment, ToolRecord

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
logprob = st.floats(-50, 0, width=32)


@st.composite
def routes(draw: st.DrawFn, ids: list[int]) -> np.ndarray | None:
    """Two layers of three experts for each token, for some none."""
    row = st.permutations(range(40)).map(lambda order: [order[:3], order[3:6]]) | st.just([[-1] * 3] * 2)
    known = draw(st.lists(row, min_size=len(ids), max_size=len(ids)))
    return np.array(known, np.int16).reshape(len(ids), 2, 3) if draw(st.booleans()) else None


@st.composite
def trees(draw: st.DrawFn) -> RolloutTree:
    prompt = draw(tokens)
    tree = RolloutTree(draw(st.text(max_size=5)), prompt, routes=draw(routes(prompt)))
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree.segments) - 1))
        ids = draw(tokens)
        if draw(st.booleans()):
            record = ToolRecord("python", {"code": draw(st.text(max_size=9))}, "ok", draw(st.floats(0, 9)), False)
            tree.add(parent, Role.TOOL, ids, tool=record, routes=draw(routes(ids)))
            continue
        known = draw(st.booleans())
        tree.add(
            parent,
            Role.MODEL,
            ids,
            logprobs=draw(st.lists(logprob, min_size=len(ids), max_size=len(ids))) if known else None,
            entropies=draw(st.lists(st.floats(0, 12, width=32), max_size=len(ids))) if known else None,
            policy_version=draw(st.integers(0, 99)),
            finish=draw(st.sampled_from([None, *Finish])),
            branch=draw(st.sampled_from([None, BranchRecord(0.1, 0.6, 0.5, "draw")])),
            routes=draw(routes(ids)),
        )
    return tree


def assert_equal(ours: RolloutTree, theirs: RolloutTree) -> None:
    assert ours.task_id == theirs.task_id
    for one, other in zip(ours.segments, theirs.segments, strict=True):
        for name in (field.name for field in fields(Segment)):
            left, right = getattr(one, name), getattr(other, name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)
            else:
                assert left == right


@given(trees())
def test_json_round_trip_loses_nothing(tree: RolloutTree) -> None:
    assert_equal(RolloutTree.from_dict(json.loads(json.dumps(tree.to_dict()))), tree)


@settings(max_examples=25)
@given(trees())
def test_segments_of_another_tree_are_appended_with_all_they_hold(tree: RolloutTree) -> None:
    again = RolloutTree(tree.task_id, tree.prompt_ids, routes=tree.segments[0].routes)
    for segment in tree.segments[1:]:
        again.append(segment.parent, segment)
    assert_equal(again, tree)


@given(trees())
def test_trajectories_keep_tokens_masks_and_logprobs_in_step(tree: RolloutTree) -> None:
    for leaf in tree.leaves():
        flat = tree.trajectory(leaf)
        assert len(flat.token_ids) == len(flat.loss_mask) == len(flat.logprobs) == len(flat.segment_of_token)
        position = 0
        for index in tree.path(leaf):
            segment = tree.segments[index]
            part = slice(position, position + len(segment))
            position += len(segment)
            np.testing.assert_array_equal(flat.token_ids[part], segment.token_ids)
            assert (flat.loss_mask[part] == (segment.role is Role.MODEL)).all()
            assert (flat.segment_of_token[part] == index).all()
            expected = np.zeros(len(segment)) if segment.logprobs is None else segment.logprobs
            np.testing.assert_array_equal(flat.logprobs[part], expected)
        assert position == len(flat.token_ids)
        assert (flat.logprobs[flat.loss_mask == 0] == 0).all()


@given(trees())
def test_unique_tokens_never_exceed_flat_tokens(tree: RolloutTree) -> None:
    assert tree.unique_tokens <= tree.flat_tokens
    assert tree.flat_tokens == sum(len(tree.trajectory(leaf).token_ids) for leaf in tree.leaves())
    if len(tree.leaves()) == 1:
        assert tree.unique_tokens == tree.flat_tokens


@given(trees())
def test_segments_lie_on_a_path_to_a_leaf(tree: RolloutTree) -> None:
    leaves = tree.leaves()
    assert set().union(*(tree.path(leaf) for leaf in leaves)) == set(range(len(tree.segments)))
    assert all(segment.parent < index for index, segment in enumerate(tree.segments))


def test_lone_prompt_is_a_leaf() -> None:
    tree = RolloutTree("task", [1, 2])
    assert tree.leaves() == [0]
    assert tree.unique_tokens == tree.flat_tokens == 2


@pytest.mark.parametrize(
    ("parent", "role", "fields", "message"),
    [
        (7, Role.MODEL, {}, "unknown parent 7"),
        (-1, Role.MODEL, {}, "unknown parent -1"),
        (0, Role.MODEL, {"logprobs": [-0.5]}, "1 log-probs for 2 tokens"),
        (0, Role.MODEL, {"entropies": [1.0, 1.0, 1.0]}, "3 entropies for 2 tokens"),
        (0, Role.TOOL, {"logprobs": [-0.5, -0.5]}, "belong to MODEL"),
        (0, Role.MODEL, {"tool": ToolRecord("python", {}, "ok", 0.0, False)}, "belongs to TOOL"),
        (0, Role.PROMPT, {}, "one PROMPT"),
        (0, Role.MODEL, {"logprobs": [float("nan"), -0.5]}, "must be finite"),
        (0, Role.MODEL, {"entropies": [float("inf")]}, "must be finite"),
        (0, Role.TOOL, {"routes": np.zeros((3, 1, 1))}, "for 2 tokens"),
        (0, Role.MODEL, {"routes": [[[1, 1]], [[1, 2]]]}, "must be different"),
        (0, Role.MODEL, {"routes": [[[0, 1], [-1, -1]], [[1, 2], [3, 4]]]}, "all of its routes -1"),
    ],
)
def test_segment_that_does_not_fit_is_refused(parent: int, role: Role, fields: dict, message: str) -> None:
    tree = RolloutTree("task", [1])
    with pytest.raises(ValueError, match=message):
        tree.add(parent, role, [2, 3], **fields)
    assert len(tree.segments) == 1


def test_negative_and_oversized_token_ids_are_refused() -> None:
    for bad in ([-1], [2**31]):
        with pytest.raises(ValueError, match="token ids"):
            RolloutTree("task", bad)


def test_token_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="must be integers"):
        RolloutTree("task", [1.7])


def test_segments_cannot_be_edited_after_sampling() -> None:
    tree = RolloutTree("task", [1])
    index = tree.add(0, Role.MODEL, [2, 3], logprobs=[-0.1, -0.2])
    with pytest.raises(ValueError, match="read-only"):
        tree.segments[index].token_ids[0] = 9
    with pytest.raises(AttributeError):
        tree.segments[index].parent = 1  # type: ignore[misc]  # the mistake


def test_from_dict_refuses_what_is_not_a_tree() -> None:
    with pytest.raises(ValueError, match="segment 0"):
        RolloutTree.from_dict({"task_id": "x", "segments": [{"role": "model", "parent": -1, "token_ids": []}]})
    root = {"role": "prompt", "parent": -1, "token_ids": [1]}
    with pytest.raises(ValueError, match="unknown segment fields: colour"):
        RolloutTree.from_dict(
            {"task_id": "x", "segments": [root, {"role": "model", "parent": 0, "token_ids": [], "colour": 1}]}
        )
