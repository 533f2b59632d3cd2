"""Scorers: one for the held-out tasks of a run, and one for each metric of benchmarks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.evaluation.benchmarks import Metric
from arpo_megatron.evaluation.journal import Attempt, Outcome
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import AgentResponse, NoResponse, Response, outcome_without_answer
from arpo_megatron.rewards.base import Response as RewardResponse
from arpo_megatron.rewards.base import ResponseGroup, Reward
from arpo_megatron.rewards.judge.judge import Judge
from arpo_megatron.rewards.judge.prompts import CORRECT, equivalence_question, released_question
from arpo_megatron.rewards.math.verify import math_equal
from arpo_megatron.rewards.qa import best, exact_match, token_f1, without_latex
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL
from arpo_megatron.tasks.tags.response import last_boxed
from arpo_megatron.tree import Finish

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """Score of a response. `outcome` is set only if it does not follow from the other fields."""

    answer: str | None
    score: float
    correct: bool
    format_ok: bool
    outcome: Outcome | None = None
    detail: str = ""


Scorer = Callable[[Question, AgentResponse], AnswerVerdict]


class JudgeUnavailableError(RuntimeError):
    """The judge gave no verdict, so the answer cannot be scored."""


AnswerCheck = Callable[[str, str, str], bool]
"""(question, answer, expected) -> whether both answers have the same meaning; raises JudgeUnavailableError."""


def judge_check(model: Judge, wording: Literal["marked", "arpo"] = "marked") -> AnswerCheck:
    """Return a check by a judge model that is asked in one of two wordings (`reward.judge.wording`)."""
    worded = released_question if wording == "arpo" else equivalence_question

    def judge(question: str, answer: str, expected: str) -> bool:
        (verdict,) = model.ask([worded(question, expected, answer)])
        if verdict is None:
            raise JudgeUnavailableError("the judge gave no verdict")
        return verdict == CORRECT

    return judge


def extract_answer(model_text: str) -> str | None:
    """Return the last box inside the last <answer>, else the text of that answer, else the last box of the text.

    An answer that a reader would find counts; `Attempt.format_ok` records whether the format was kept.
    """
    blocks = _ANSWER.findall(model_text)
    inside = blocks[-1].strip() if blocks else ""
    box = last_boxed(inside)
    if box is None and inside and "\\boxed{" not in inside:
        return inside
    box = last_boxed(model_text) if box is None else box
    return (box or "").strip() or None


def benchmark_scorer(
    metric: Metric, tools: Tools, judge: AnswerCheck | None, protocol: CallProtocol = DEFAULT_PROTOCOL
) -> Scorer:
    """Return the scorer of a metric; without a judge, the metric "judge" is scored by token F1."""
    grade = {"math": _math, "f1": _f1, "judge": _f1}[metric] if judge is None or metric != "judge" else _judged(judge)

    def score(question: Question, response: AgentResponse) -> AnswerVerdict:
        answer = extract_answer(response.model_text)
        last = response.text if response.last_turn is None else response.last_turn
        tagged = not protocol.read_response(response.text, last, frozenset(response.called)).reason
        format_ok = last_boxed(response.model_text) is not None if tools is Tools.NONE else tagged
        if answer is None:
            return AnswerVerdict(None, 0.0, False, format_ok)
        try:
            value, correct = grade(question, answer)
        except JudgeUnavailableError as error:
            return AnswerVerdict(answer, 0.0, False, format_ok, Outcome.UNJUDGED, str(error))
        return AnswerVerdict(answer, value, correct, format_ok)

    return score


def held_out_scorer(reward: Reward, tasks: Sequence[Task], threshold: float) -> Scorer:
    """Return a scorer by the run's reward: the format counts, and success is accuracy above `threshold`."""
    by_id = {task.id: task for task in tasks}

    def grade(question: Question, response: AgentResponse) -> AnswerVerdict:
        given = RewardResponse(
            response.text,
            last_turn=response.last_turn,
            called=frozenset(response.called),
            rewards=response.rewards,
        )
        (score,) = reward.score_group(ResponseGroup(by_id[question.id], [given]))
        answer = score.answer if score.format_ok else None
        return AnswerVerdict(answer, score.accuracy, score.accuracy > threshold, score.format_ok, detail=score.reason)

    return grade


def score_response(question: Question, number: int, response: Response, scorer: Scorer) -> Attempt:
    """Score the response of attempt `number` at a question."""
    if isinstance(response, NoResponse):
        verdict = AnswerVerdict(None, 0.0, False, False, response.outcome, response.detail)
        response = AgentResponse("", "", finish=Finish.END)
    else:
        verdict = scorer(question, response)
    return Attempt(
        benchmark=question.benchmark,
        question_id=question.id,
        attempt=number,
        question=question.text,
        expected=question.answers,
        answer=verdict.answer,
        score=verdict.score,
        correct=verdict.correct,
        format_ok=verdict.format_ok,
        outcome=verdict.outcome or _outcome(verdict, response),
        detail=verdict.detail,
        tool_calls=response.tool_calls,
        tool_errors=response.tool_errors,
        model_tokens=response.model_tokens,
        tool_tokens=response.tool_tokens,
        seconds=response.seconds,
        response=response.text,
    )


def _outcome(verdict: AnswerVerdict, response: AgentResponse) -> Outcome:
    if verdict.answer is None:
        return outcome_without_answer(response.finish)
    if verdict.correct:
        return Outcome.RIGHT
    return Outcome.PARTIAL if verdict.score > 0 else Outcome.WRONG


def _math(question: Question, answer: str) -> tuple[float, bool]:
    correct = any(math_equal(answer, expected) for expected in question.answers)
    return float(correct), correct


def _f1(question: Question, answer: str) -> tuple[float, bool]:
    answer = without_latex(answer)
    return best(token_f1, answer, question.answers), bool(best(exact_match, answer, question.answers))


def _judged(judge: AnswerCheck) -> Callable[[Question, str], tuple[float, bool]]:
    def grade(question: Question, answer: str) -> tuple[float, bool]:
        correct = any(judge(question.text, answer, expected) for expected in question.answers)
        return float(correct), correct

    return grade
