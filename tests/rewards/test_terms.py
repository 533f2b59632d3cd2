"""Reward terms: each formula, its weight, and its name in the metrics."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from arpo_megatron.config import JudgeConfig, RewardConfig
from arpo_megatron.errors import UserError
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Response, ResponseGroup, Score
from arpo_megatron.rewards.terms.eapo import GeometricDiscount
from arpo_megatron.rewards.terms.measures import BrokenFormat, Length, Overlong, ToolCalls
from arpo_megatron.rewards.terms.spear import FadingToolBonus
from arpo_megatron.tasks.base import Task
from tests.rewards.judge_server import Rule, chat_server, part, verdict

TASK = Task("t", ({"role": "user", "content": "?"},), "5", "math", "?")


def text(answer: str) -> str:
    return f"<think>hm</think><answer>\\boxed{{{answer}}}</answer>"


def scores(*accuracies: float) -> list[Score]:
    return [Score(accuracy, accuracy, format_ok=True) for accuracy in accuracies]


def group(*responses: Response, step: int = 0) -> ResponseGroup:
    return ResponseGroup(TASK, responses, step)


def test_overlong_falls_linearly_within_the_buffer() -> None:
    lengths = [0, 70, 80, 90, 95, 100, 130]
    found = Overlong(100, 20).values(group(*(Response("", n) for n in lengths)), scores(*[1.0] * 7))
    # DAPO, equation 13, written out
    expected = [0.0 if n <= 80 else (80 - n) / 20 if n <= 100 else -1.0 for n in lengths]
    assert found == pytest.approx(expected)


def test_measures_of_format_length_and_calls() -> None:
    given = group(Response("", 25, 2), Response("", 400, 0))
    broken = [Score(1.0, 1.0, format_ok=True), Score(-1.0, 0.0, format_ok=False)]
    assert BrokenFormat().values(given, broken) == [0.0, -1.0]
    assert Length(100).values(given, broken) == [-0.25, -1.0]
    assert ToolCalls().values(given, broken) == [-2.0, 0.0]


def test_eapo_discounts_right_answers_by_rounds() -> None:
    given = group(*(Response("", 0, calls) for calls in (0, 1, 3, 3)))
    found = GeometricDiscount(0.9).values(given, scores(1.0, 1.0, 0.5, 0.0))
    accuracies = [1.0, 1.0, 0.5, 0.0]
    whole = [a + value for a, value in zip(accuracies, found, strict=True)]
    assert whole == pytest.approx([1.0, 0.9, 0.5 * 0.9**3, 0.0])


@pytest.mark.parametrize(
    ("step", "left"), [(0, 1.0), (50, 0.5), (25, (1 + math.sqrt(0.5)) / 2), (100, 0.0), (500, 0.0)]
)
def test_spear_tool_bonus_fades(step: int, left: float) -> None:
    given = group(*(Response("", 0, calls) for calls in (0, 1, 4, 30)), step=step)
    found = FadingToolBonus(100).values(given, scores(0, 0, 1, 1))
    assert found == pytest.approx([0.0, 0.1 * left, 0.4 * left, left])


def test_terms_are_weighted_added_and_named() -> None:
    settings = RewardConfig(terms={"overlong": 2.0, "tool_calls": 0.1, "format": 0.0}, params={"overlong_buffer": 50})
    reward = make_reward(settings, max_response_tokens=100)
    found = reward.score_group(group(Response(text("5"), 75, 1), Response("broken", 40, 3)))
    assert [score.reward for score in found] == pytest.approx([1.0 - 1.0 - 0.1, -1.0 - 0.3])
    assert found[0].terms == pytest.approx(
        {"verified": 1.0, "undecided": 0.0, "tool_bonus": 0.0, "overlong": -1.0, "tool_calls": -0.1}
    )
    assert found[0].accuracy == 1.0, "success is measured without them"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"terms": {"overlogn": 1.0}}, "did you mean overlong"),
        ({"kind": "arppo"}, "did you mean arpo"),
        ({"terms": {"eapo": 1.0}, "params": {"discuont": 0.9}}, "did you mean discount"),
        ({"terms": {"eapo": 1.0}, "params": {"discount": 1.5}}, "discount must be"),
        ({"terms": {"overlong": 1.0}, "params": {"overlong_buffer": 101}}, "overlong_buffer must be"),
        ({"terms": {"length": 1.0}, "params": {"max_response_tokens": 7}}, "use rollout.max_response_tokens"),
    ],
)
def test_impossible_terms_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_reward(RewardConfig(**settings), max_response_tokens=100)
    assert "\n" not in str(caught.value)


def judged(terms: dict[str, float], answers: Sequence[str], rule: Rule) -> list[Score]:
    with chat_server(rule) as server:
        judge = JudgeConfig(url=server.url, model="m", retries=0)
        reward = make_reward(RewardConfig(terms=terms, judge=judge))
        return reward.score_group(group(*(Response(answer) for answer in answers)))


def test_fapo_asks_only_about_right_answers() -> None:
    def rule(asked: str) -> str:
        solution = part(asked, "solution")
        assert "\\boxed{5}" in solution
        return verdict(asked, "FLAWED" if "guess" in solution else "SOUND")

    answers = [text("5"), text("5") + "guess", text("6") + "guess", "guess"]
    found = judged({"fapo": 0.5}, answers, rule)
    assert [score.reward for score in found] == [1.0, 0.5, 0.0, -1.0]


def test_verified_asks_about_details_only_if_the_requirements_are_met() -> None:
    asked_about: list[str] = []

    def rule(asked: str) -> str:
        solution = part(asked, "solution")
        if "meets every requirement" in asked:
            return verdict(asked, "UNSATISFIED" if "late" in solution else "SATISFIED")
        asked_about.append(solution)
        return verdict(asked, "INCONSISTENT" if "made up" in solution else "CONSISTENT")

    answers = [text("5"), text("5") + "late", text("5") + "made up", text("6"), "guess"]
    found = judged({"verified": 1.0}, answers, rule)
    assert [score.reward for score in found] == [1.0, 0.0, 0.0, 0.0, -1.0]
    assert sorted(asked_about) == sorted([answers[0], answers[2]])


def test_spo_asks_in_both_orders() -> None:
    def rule(asked: str) -> str:
        """Prefer the longer solution if lengths differ by more than one, else the first."""
        first, second = (len(part(asked, f"{place} solution")) for place in ("first", "second"))
        return verdict(asked, "FIRST" if first >= second - 1 else "SECOND")

    found = judged({"spo": 1.0}, ["a", "bb", "cccc", "cccc"], rule)
    # "a" and "bb" each win where they stand first: a half each; "cccc" beats both, and its twin half of the time.
    shares = [score.terms["spo"] for score in found]
    assert shares == pytest.approx([0.5 / 3, 0.5 / 3, 2.5 / 3, 2.5 / 3])
    assert sum(shares) == pytest.approx(4 / 2)
