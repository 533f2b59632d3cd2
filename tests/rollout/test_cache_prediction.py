"""Predicted engine requests and cached tokens, against a scripted engine with a radix cache."""

import numpy as np
import pytest

from arpo_megatron.algorithms.branching import BranchPolicy, GrpoPolicy
from arpo_megatron.rollout.accounting import RolloutCounts, TreeStats, rollout_stats
from arpo_megatron.rollout.cache_prediction import predict_requests
from arpo_megatron.tasks.tags.calls import ends_inside_stop
from arpo_megatron.tree import Finish, Int32Array, Role, RolloutTree, ToolRecord
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PLAN, PROMPT, Start, arpo, grow, planned


def test_tree_shape_predicts_requests_and_cached_tokens(scripted_engine: Start, sandbox_url: str) -> None:
    cases: tuple[BranchPolicy, ...] = (
        GrpoPolicy(1),
        GrpoPolicy(4),
        arpo(8, 3, branch_probability=1.0, entropy_weight=0.0),
        arpo(6, 1, branch_probability=0.5),
        arpo(5, 2, branch_probability=0.0, entropy_weight=0.0),
    )
    for policy in cases:
        engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
        tree, grower = grow(engine.url, sandbox_url, policy)
        predicted = predict_requests([tree], policy)
        assert grower.counts.requests == len(predicted) == len(engine.requests)
        assert grower.counts.prompt_tokens == sum(request.prompt_tokens for request in predicted)
        assert sorted(len(request["input_ids"]) for request in engine.requests) == sorted(
            request.prompt_tokens for request in predicted
        )
        assert grower.counts.cached_tokens >= sum(
            request.cached_tokens for request in predicted
        )  # equal if none repeats


@pytest.mark.parametrize("k", [1, 26, 38, 40])
def test_prediction_covers_measured_tokens_that_end_inside_a_tag(
    scripted_engine: Start, sandbox_url: str, k: int
) -> None:
    """The rest of the tag is sampled token by token."""
    policy = arpo(4, 2, k=k, branch_probability=1.0, entropy_weight=0.0)
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, grower = grow(engine.url, sandbox_url, policy)

    def inside_stop(token_ids: Int32Array) -> bool:
        return ends_inside_stop(CODEC.decode(token_ids.tolist()), LIMITS.stops)

    predicted = predict_requests([tree], policy, inside_stop)
    assert len(predicted) > len(predict_requests([tree], policy))
    assert sorted(len(request["input_ids"]) for request in engine.requests) == sorted(
        request.prompt_tokens for request in predicted
    )
    assert grower.counts.cached_tokens >= sum(request.cached_tokens for request in predicted)
    each = [TreeStats.of(tree, policy, inside_stop)]
    stats = rollout_stats([tree], grower.counts, each, failed=0, seconds=1.0)
    assert stats.totals.predicted_prompt_tokens == grower.counts.prompt_tokens


def test_prediction_is_exact_if_all_samples_differ(scripted_engine: Start, sandbox_url: str) -> None:
    serial = iter(range(1000))

    def script(text: str) -> str:
        calls = text.count("</result>")
        if text.endswith(("</result>", PROMPT)):  # a new segment: unlike any other
            return f"{next(serial):03d}<python>1+{calls}</python>" if calls < 2 else f"{next(serial):03d} done"
        return "7<python>3</python>"  # the rest of a measured segment

    policy = arpo(12, 4, k=3, beam_size=3)
    engine = scripted_engine(ScriptedEngine(script))
    tree, grower = grow(engine.url, sandbox_url, policy)
    assert len(tree.leaves()) == 12
    predicted = predict_requests([tree], policy)
    assert len(predicted) == len(engine.requests)
    assert grower.counts.cached_tokens == sum(request.cached_tokens for request in predicted)


class Watched(RolloutTree):
    """A tree that refuses to join the tokens of a path: done for each segment, that is quadratic in its depth."""

    def path_tokens(self, leaf: int) -> Int32Array:
        raise AssertionError(f"the tokens above segment {leaf} were copied")


def test_statistics_of_a_step_take_time_linear_in_its_tokens() -> None:
    trees: list[RolloutTree] = []
    for number in range(3):
        tree, last = Watched(f"t{number}", np.arange(30 + number)), 0
        for _ in range(20):
            last = tree.add(last, Role.MODEL, [1, 2, 3], logprobs=[-1.0] * 3, finish=Finish.TOOL_CALL)
            last = tree.add(last, Role.TOOL, [4, 5], tool=ToolRecord("search", {}, "ok", 0.1, False))
        tree.add(last, Role.MODEL, [6, 7], logprobs=[-1.0] * 2, finish=Finish.END)
        trees.append(tree)
    for policy in (GrpoPolicy(1), GrpoPolicy(2), arpo(6, 1)):
        predicted = predict_requests(trees, policy)
        stats = rollout_stats(
            trees, RolloutCounts(), [TreeStats.of(tree, policy) for tree in trees], failed=0, seconds=1.0
        )
        assert stats.totals.predicted_prompt_tokens == sum(request.prompt_tokens for request in predicted)
        assert stats.totals.predicted_cached_tokens == sum(request.cached_tokens for request in predicted)
        assert stats.totals.calls_inherited == 0
