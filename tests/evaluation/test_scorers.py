"""Extraction of answers, and their scores."""

import pytest

from arpo_megatron.evaluation.agents.oracle import NONSENSE, wrong_answer
from arpo_megatron.evaluation.benchmarks import Metric
from arpo_megatron.evaluation.journal import Attempt, Outcome
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import AgentResponse, NoResponse
from arpo_megatron.evaluation.scorers import JudgeUnavailableError, benchmark_scorer, extract_answer, score_response
from arpo_megatron.tree import Finish

NUMBER = Question("aime24", "aime24-0", "Six times seven?", ("042",))
NAME = Question("hotpotqa", "hotpotqa-0", "Who wrote it?", ("Jane Austen", "Austen"))


def attempt(question: Question, text: str, finish: Finish = Finish.END, *, tools: Tools = Tools.TRAINED) -> Attempt:
    scorer = benchmark_scorer("math" if question is NUMBER else "f1", tools, None)
    return score_response(question, 0, AgentResponse(text, text, finish), scorer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>so</think><answer>The answer is \\boxed{\\frac{1}{2}}.</answer>", "\\frac{1}{2}"),
        ("\\boxed{1} no: <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer> wait <answer>\\boxed{2}</answer>", "2"),
        ("so it is $\\boxed{7}$", "7"),
        ("<answer> Jane Austen </answer>", "Jane Austen"),
        ("<answer>\\boxed{3}", "3"),
        ("<answer>\\boxed{3", None),
        ("<answer></answer>", None),
        ("\\boxed{ }", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_answer_is_extracted_where_a_reader_would_find_it(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_box_in_a_tool_result_is_not_an_answer() -> None:
    model_text = "<think>t</think><search>q</search>"
    text = model_text + " <result>\n\\boxed{42} <answer>\\boxed{42}</answer>\n</result>"
    found = score_response(
        NUMBER, 0, AgentResponse(text, model_text, Finish.LENGTH), benchmark_scorer("math", Tools.TRAINED, None)
    )
    assert (found.answer, found.score, found.outcome) == (None, 0.0, Outcome.LENGTH)


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        (("5", "6"), "7"),
        (("5", "six", "6.0", "007"), "8"),
        (("5", "6 apples"), "7"),
        (("1,199", "1,200"), "1201"),
        (("-1", "0"), "2"),  # token F1 drops the sign, so 1 equals -1
        (("Ada", "5"), NONSENSE),
    ],
)
def test_wrong_answer_is_never_accepted(answers: tuple[str, ...], wrong: str) -> None:
    question = Question("hotpotqa", "hotpotqa-0", "How many?", answers)
    assert wrong_answer(question) == wrong
    metrics: tuple[Metric, ...] = ("math", "f1")
    for metric in metrics:
        text = f"<answer>\\boxed{{{wrong}}}</answer>"
        found = score_response(
            question, 0, AgentResponse(text, text, Finish.END), benchmark_scorer(metric, Tools.NONE, None)
        )
        assert found.score == 0.0


def test_equal_expressions_are_correct() -> None:
    assert attempt(NUMBER, "<answer>\\boxed{\\frac{84}{2}}</answer>").correct
    assert not attempt(NUMBER, "<answer>\\boxed{-42}</answer>").correct


def test_f1_uses_the_closest_accepted_answer() -> None:
    found = attempt(NAME, "<answer>\\boxed{the writer Jane Austen}</answer>")
    assert found.score == pytest.approx(0.8)
    assert (found.correct, found.outcome) == (False, Outcome.PARTIAL)
    assert attempt(NAME, "<answer>\\boxed{austen}</answer>").outcome is Outcome.RIGHT
    assert attempt(NAME, "<answer>\\boxed{Emily Bronte}</answer>").outcome is Outcome.WRONG


def test_format_is_recorded_besides_the_answer() -> None:
    bare = "it is \\boxed{42}"
    assert attempt(NUMBER, bare).correct
    assert not attempt(NUMBER, bare).format_ok
    assert attempt(NUMBER, bare, tools=Tools.NONE).format_ok
    assert attempt(NUMBER, "<think>t</think><answer>\\boxed{42}</answer>").format_ok


@pytest.mark.parametrize(
    ("finish", "outcome"),
    [
        (Finish.END, Outcome.NO_ANSWER),
        (Finish.LENGTH, Outcome.LENGTH),
        (Finish.CALL_LIMIT, Outcome.CALL_LIMIT),
        (Finish.MALFORMED, Outcome.MALFORMED),
    ],
)
def test_outcome_without_answer_follows_the_finish(finish: Finish, outcome: Outcome) -> None:
    assert attempt(NUMBER, "hm", finish).outcome is outcome


def test_failed_attempt_scores_zero_with_its_reason() -> None:
    found = score_response(NUMBER, 2, NoResponse(Outcome.ENGINE, "gone"), benchmark_scorer("math", Tools.NONE, None))
    assert (found.attempt, found.score, found.outcome, found.detail) == (2, 0.0, Outcome.ENGINE, "gone")


def test_unjudged_answer_is_not_wrong() -> None:
    def down(question: str, answer: str, expected: str) -> bool:
        raise JudgeUnavailableError("the judge is down")

    asked: list[tuple[str, str, str]] = []

    def lenient(question: str, answer: str, expected: str) -> bool:
        asked.append((question, answer, expected))
        return True

    response = AgentResponse(
        "<answer>\\boxed{Miss Austen}</answer>", "<answer>\\boxed{Miss Austen}</answer>", Finish.END
    )
    found = score_response(NAME, 0, response, benchmark_scorer("judge", Tools.TRAINED, down))
    assert (found.outcome, found.answer, found.detail) == (Outcome.UNJUDGED, "Miss Austen", "the judge is down")
    found = score_response(NAME, 0, response, benchmark_scorer("judge", Tools.TRAINED, lenient))
    assert (found.outcome, found.score) == (Outcome.RIGHT, 1.0)
    assert asked == [("Who wrote it?", "Miss Austen", "Jane Austen")]
