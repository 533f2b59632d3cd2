"""ARPO's hierarchical reward: format gate, accuracy of the answer, bonus for using both tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.rewards.base import Response, ResponseGroup, Score
from arpo_megatron.rewards.judge.prompts import CORRECT, equivalence_question, reference, user_question
from arpo_megatron.rewards.math.verify import MathVerdict, compare_answers
from arpo_megatron.rewards.qa import best, exact_match, token_f1, without_latex
from arpo_megatron.tasks.protocols.base import CallProtocol, Parsed
from arpo_megatron.tasks.protocols.tools import DEFAULT_NAMES
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL

Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class ArpoReward:
    """R = max(Acc + r_M, Acc) if the format is right, else `format_penalty` (ARPO, arXiv 2507.19849, eq. 8).

    r_M is `tool_bonus` if Acc > 0 and both search and python were called. Acc is 1 or 0 for mathematics; for questions
    answered in words it is token F1, exact match, or the judge's verdict.
    """

    format_penalty: float = -1.0
    tool_bonus: float = 0.1
    math: Literal["verify", "judge"] = "verify"
    qa: Literal["f1", "exact_match", "judge"] = "f1"
    protocol: CallProtocol = DEFAULT_PROTOCOL

    @property
    def needs_judge(self) -> bool:
        """Whether answers of some kind are judged."""
        return "judge" in (self.math, self.qa)

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Score each response; equal answers are graded once."""
        responses = [self._parsed(response) for response in group.responses]
        answers = list(dict.fromkeys(parsed.answer for parsed in responses if parsed.answer is not None))
        grades = dict(zip(answers, self._grades(answers, group), strict=True))
        return [self._score(parsed, grades) for parsed in responses]

    def _parsed(self, response: Response) -> Parsed:
        last = response.text if response.last_turn is None else response.last_turn
        return self.protocol.read_response(response.text, last, response.called)

    def _score(self, parsed: Parsed, grades: dict[str, tuple[float, Terms]]) -> Score:
        if parsed.answer is None:
            return Score(self.format_penalty, 0.0, format_ok=False, reason=parsed.reason)
        accuracy, terms = grades[parsed.answer]
        bonus = self.tool_bonus if accuracy > 0.0 and parsed.tools.issuperset(DEFAULT_NAMES) else 0.0
        reward = max(accuracy + bonus, accuracy)
        return Score(reward, accuracy, format_ok=True, terms={**terms, "tool_bonus": bonus}, answer=parsed.answer)

    def _grades(self, answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Terms]]:
        """Return accuracy and terms of each answer."""
        mathematics = group.task.source == "math"
        by_rule = _verified(answers, group) if mathematics else self._in_words(answers, group)
        if (self.math if mathematics else self.qa) != "judge":
            return by_rule
        if group.judge is None:
            raise ValueError("reward.math or reward.qa is judge, but the group has no judge")
        question, truth = user_question(group.task), reference(group.task)
        verdicts = group.judge.ask([equivalence_question(question, truth, answer) for answer in answers])
        return [
            rule if verdict is None else (float(verdict == CORRECT), {**rule[1], "judged": float(verdict == CORRECT)})
            for verdict, rule in zip(verdicts, by_rule, strict=True)
        ]

    def _in_words(self, answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Terms]]:
        measures, truths = {"f1": token_f1, "exact_match": exact_match}, group.task.answers
        plain = [without_latex(answer) for answer in answers]
        scores = [{name: best(measure, answer, truths) for name, measure in measures.items()} for answer in plain]
        return [(each["exact_match" if self.qa == "exact_match" else "f1"], each) for each in scores]


def _verified(answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Terms]]:
    grades: list[tuple[float, Terms]] = []
    for verdict in compare_answers(answers, group.task.answers):
        right = float(verdict is MathVerdict.EQUAL)
        grades.append((right, {"verified": right, "undecided": float(verdict is MathVerdict.UNDECIDED)}))
    return grades
