"""One request for each segment: decisions are taken with first tokens that stream while the engine samples the rest."""

import json

import numpy as np
import pytest

from arpo_megatron.engine.request import Sampling, encode_request, generation_request
from arpo_megatron.rollout.cache_prediction import predict_tree_requests
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Role, RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import Start, any_of, arpo, grow

POLICY = arpo(12, 3, k=3, branch_probability=0.7)


def content(tree: RolloutTree) -> list[object]:
    return [
        (s.role, s.parent, s.token_ids.tolist(), s.finish, s.branch and (s.branch.draw, s.branch.why))
        for s in tree.segments
    ]


def seeded(**fields: object) -> ScriptedEngine:
    return ScriptedEngine(str, seeded=any_of, **fields)  # type: ignore[arg-type]


def test_fork_costs_one_request_and_grows_the_same_tree(scripted_engine: Start, sandbox_url: str) -> None:
    apart, streamed = scripted_engine(seeded()), scripted_engine(seeded(piece_s=0.01))
    expected, _ = grow(apart.url, sandbox_url, POLICY)
    tree, grower = grow(streamed.url, sandbox_url, POLICY, streams=True)
    assert content(tree) == content(expected)
    assert tree.forks > 2
    models = sum(segment.role is Role.MODEL for segment in tree.segments)
    assert len(streamed.requests) == models + 1 < len(apart.requests), "one for the prompt"
    assert len(predict_tree_requests(tree, POLICY, streamed=True)) == models + 1
    assert grower.counts.requests == models + 1


def test_written_prefixes_are_the_tokens_of_the_path() -> None:
    """Each segment is written once, and requests below it repeat its bytes."""
    root = Node(Role.PROMPT, (), np.array([5, 17, 300], np.int32))
    node = root.add_child(Role.MODEL)
    node.token_ids = np.array([2**31 - 1], np.int32)
    node = node.add_continuation()  # cut short before its first token
    tool = node.add_child(Role.TOOL)
    tool.token_ids = np.array([0, 9], np.int32)
    ids = [5, 17, 300, 2**31 - 1, 0, 9]
    for below in (tool, tool):
        encoded = below.encoded_path()
        body = generation_request(ids, max_new_tokens=1, sampling=Sampling(), stop=(), routes=None, encoded=encoded)
        assert json.loads(encode_request(body))["input_ids"] == ids
    assert tool.encoded_path()[0] is root.encoded


def test_decision_is_taken_while_the_path_continues(scripted_engine: Start, sandbox_url: str) -> None:
    """The siblings ask before the rest of the measured segment has arrived."""
    engine = scripted_engine(seeded(piece_s=0.1))
    policy = arpo(4, 1, k=3, branch_probability=1.0, entropy_weight=0.0)
    tree, _ = grow(engine.url, sandbox_url, policy, streams=True)
    assert tree.forks > 0
    assert engine.most_running > 1


@pytest.mark.parametrize("cuts", [1, 3])
def test_decided_path_continues_after_its_first_tokens_if_the_stream_breaks(
    scripted_engine: Start, sandbox_url: str, cuts: int
) -> None:
    """Its siblings exist already, so the tokens on which the decision was based must stay."""
    expected, _ = grow(scripted_engine(seeded()).url, sandbox_url, POLICY)
    engine = scripted_engine(seeded(cuts=cuts))
    tree, _ = grow(engine.url, sandbox_url, POLICY, streams=True)
    assert engine.cuts == 0
    assert content(tree) == content(expected)


def test_tree_continues_from_every_point_of_its_record(scripted_engine: Start, sandbox_url: str) -> None:
    entries: list[bytes] = []
    engine = scripted_engine(seeded())
    expected, _ = grow(engine.url, sandbox_url, POLICY, streams=True, record=entries.append)
    for known in range(0, len(entries) + 1, 4):
        whole = entries[:known]
        tree, _ = grow(engine.url, sandbox_url, POLICY, streams=True, entries=entries[:known], record=whole.append)
        assert content(tree) == content(expected)
        asked = len(engine.requests)
        again, _ = grow(engine.url, sandbox_url, POLICY, streams=True, entries=whole)
        assert content(again) == content(expected), "first tokens after which another request continued"
        assert len(engine.requests) == asked
