"""Limits of a trajectory: what a call beyond one gets, and what evaluations do differently."""

from dataclasses import replace
from typing import Any

import pytest

from arpo_megatron.algorithms.branching import GrpoPolicy
from arpo_megatron.config import EvalConfig, JobConfig, RolloutConfig
from arpo_megatron.rollout.limits import NO_CALLS, CallHistory, RolloutLimits
from arpo_megatron.tasks.protocols.base import InvalidCall, Notice, ToolCall
from arpo_megatron.tasks.protocols.tools import ToolDefinition
from arpo_megatron.tasks.tags.calls import RESULT_FRAME
from arpo_megatron.tasks.tags.protocol import TagProtocol
from arpo_megatron.tree import Finish, Role, RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import LIMITS, Start, grow, planned, texts

ANSWER = "<answer>\\boxed{4}</answer>"
NOW = replace(LIMITS, at_limit="answer_now", max_tool_calls=1)


def job(**sections: Any) -> JobConfig:
    return JobConfig(name="x", **sections)


def python(code: str) -> ToolCall:
    return ToolCall("python", {"code": code})


def admitted(limits: RolloutLimits, *made: ToolCall | InvalidCall, room: int = 999) -> list[str]:
    """Return for each call how it is answered."""
    history: CallHistory = NO_CALLS
    found = []
    for call in made:
        outcome = limits.admit(call, history, room)
        if outcome is None:
            return [*found, "end"]
        answer, history = outcome
        found.append(answer.status if isinstance(answer, Notice) else "call")
    return found


@pytest.mark.parametrize(
    ("changes", "made", "expected"),
    [
        ({"max_tool_calls": 1}, "ab", ["call", "end"]),
        ({"max_tool_calls": 1, "at_limit": "answer_now"}, "abc", ["call", "limit", "end"]),
        ({"max_calls_by_tool": (("python", 1),)}, "asb", ["call", "call", "end"]),
        ({"max_calls_by_tool": (("python", 1),), "at_limit": "answer_now"}, "absc", ["call", "limit", "call", "end"]),
        ({"max_calls_by_tool": (("python", 0),)}, "a", ["end"]),
        ({"refuse_repeated": ("python",), "max_tool_calls": 3}, "aabc", ["call", "repeated", "call", "end"]),
        ({"refuse_repeated": ("python",)}, "ss", ["call", "call"]),
        ({"max_tool_calls": 2}, "iib", ["call", "call", "end"]),
        ({"refuse_repeated": ("add",)}, "iji", ["call", "call", "call"]),
    ],
)
def test_calls_within_and_beyond_limits(changes: dict[str, Any], made: str, expected: list[str]) -> None:
    calls: dict[str, ToolCall | InvalidCall] = {
        "s": ToolCall("search", {"query": "x"}),
        "i": InvalidCall("add", "no object"),
        "j": InvalidCall("add", "half a character"),
    }
    assert admitted(replace(LIMITS, **changes), *(calls.get(letter, python(letter)) for letter in made)) == expected


def test_call_without_room_for_its_result_is_not_made() -> None:
    limits = replace(LIMITS, at_limit="answer_now", answer_tokens=50)
    enough = limits.max_tool_tokens + 50
    assert admitted(limits, python("1"), room=enough) == ["call"]
    assert admitted(limits, python("1"), python("2"), room=enough - 1) == ["limit", "end"]
    assert admitted(replace(limits, at_limit="end"), python("1"), room=1) == ["call"]


def grown(start: Start, sandbox_url: str, limits: RolloutLimits, *plan: str) -> tuple[RolloutTree, Any]:
    engine = start(ScriptedEngine(planned(*plan)))
    return grow(engine.url, sandbox_url, GrpoPolicy(1), limits=limits)


def test_model_reads_that_the_limit_is_reached_and_answers(scripted_engine: Start, sandbox_url: str) -> None:
    calls = ("<python>1+1</python>", "<python>2*2</python>")
    tree, grower = grown(scripted_engine, sandbox_url, NOW, *calls, ANSWER)
    (leaf,) = tree.leaves()
    notice = RESULT_FRAME.text("The limit of 1 tool calls is reached. Answer now.")
    assert texts(tree, leaf)[1:] == [calls[0], RESULT_FRAME.text("2"), calls[1], notice, ANSWER + "\0"]
    assert [s.tool.status for s in tree.segments if s.tool is not None] == ["ok", "limit"]
    assert tree.segments[leaf].finish is Finish.END
    assert (grower.counts.calls_executed, grower.counts.calls_at_limit) == (1, 1)
    tree, _ = grown(scripted_engine, sandbox_url, NOW, *calls, "<python>3</python>")
    assert tree.segments[tree.leaves()[0]].finish is Finish.CALL_LIMIT


def test_repeated_call_is_not_executed(scripted_engine: Start, sandbox_url: str) -> None:
    limits = replace(LIMITS, refuse_repeated=("python",))
    tree, grower = grown(scripted_engine, sandbox_url, limits, *["<python>1+1</python>"] * 2, ANSWER)
    assert "You have made this call before" in texts(tree, tree.leaves()[0])[4]
    assert (grower.counts.calls_executed, grower.counts.calls_repeated) == (1, 1)


def test_each_malformed_call_reads_its_own_error(scripted_engine: Start, sandbox_url: str) -> None:
    protocol = TagProtocol((ToolDefinition("add"),))
    limits = replace(LIMITS, refuse_repeated=("add",), protocol=protocol)
    calls = ("<add>1</add>", "<add>[2]</add>", "<add>1</add>")
    tree, grower = grown(scripted_engine, sandbox_url, limits, *calls, ANSWER)
    results = texts(tree, tree.leaves()[0])[2:-1:2]
    assert "int" in results[0] and "list" in results[1] and "int" in results[2]
    assert (grower.counts.calls_invalid, grower.counts.calls_repeated) == (3, 0)


def test_turn_has_its_own_token_limit(scripted_engine: Start, sandbox_url: str) -> None:
    limits = replace(LIMITS, max_turn_tokens=25)
    tree, _ = grown(scripted_engine, sandbox_url, limits, "<python>1+1</python>", "a" * 40)
    sampled = [segment for segment in tree.segments if segment.role is Role.MODEL]
    assert [len(segment) for segment in sampled] == [20, 25]
    assert sampled[1].finish is Finish.LENGTH


def test_evaluation_has_limits_of_its_own() -> None:
    rollout: dict[str, Any] = {"max_tool_calls": 2, "max_calls_by_tool": {"python": 1}, "stop_at_answer": True}
    evaluation: dict[str, Any] = {
        "max_tool_calls": 15,
        "max_calls_by_tool": {"python": 5, "search": 10},
        "max_turn_tokens": 4096,
        "max_tool_tokens": 3072,
        "answer_tokens": 9,
        "refuse_repeated": ("search",),
    }
    config = job(rollout=RolloutConfig(**rollout), evaluation=EvalConfig(**evaluation))
    training, evaluating = RolloutLimits.training(config), RolloutLimits.evaluation(config)
    assert (training.max_tool_calls, evaluating.max_tool_calls) == (2, 15)
    assert (training.max_calls_by_tool, dict(evaluating.max_calls_by_tool)) == (
        (("python", 1),),
        {"python": 5, "search": 10},
    )
    assert (training.max_turn_tokens, evaluating.max_turn_tokens) == (None, 4096)
    assert (training.max_tool_tokens, training.answer_tokens, training.refuse_repeated) == (1024, None, ())
    assert (evaluating.max_tool_tokens, evaluating.answer_tokens, evaluating.refuse_repeated) == (3072, 9, ("search",))
    assert evaluating.stop_at_answer is True
    plain = JobConfig(name="x")
    assert RolloutLimits.evaluation(plain) == RolloutLimits.training(plain)
    with pytest.raises(ValueError, match=r"rollout.at_limit=answer_now keeps .* = 1149, which .*=1000 has not"):
        job(rollout=RolloutConfig(at_limit="answer_now", max_response_tokens=1000))
    with pytest.raises(ValueError, match=r"evaluation.at_limit=answer_now keeps .* = 2000, which .*=1500 has not"):
        own = EvalConfig(at_limit="answer_now", max_response_tokens=1500, max_tool_tokens=1000, answer_tokens=1000)
        job(evaluation=own)
    with pytest.raises(ValueError, match=r"rollout\.refuse_repeated names 'browse', which is not a tool of the job"):
        job(rollout=RolloutConfig(refuse_repeated=("browse",)))
    with pytest.raises(ValueError, match=r"evaluation\.refuse_repeated names 'browse', which is not a tool of the job"):
        job(evaluation=EvalConfig(refuse_repeated=("browse",)))
