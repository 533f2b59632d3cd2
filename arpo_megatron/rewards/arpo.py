"""ARPO's hierarchical reward: format gate, accuracy of the answer, bonus for using both tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.rewards.judge.prompts import CORRECT, question_text, same_answer
from arpo_megatron.rewards.math.verify import MathVerdict, verdicts
from arpo_megatron.rewards.qa import exact_match, token_f1
from arpo_megatron.tasks.tags.response import Parsed, parse_response

Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class ArpoReward:
    """R = max(Acc + r_M, Acc) where the format is kept, else `format_penalty` (ARPO, arXiv 2507.19849, eq. 8).

    r_M is `tool_bonus` where Acc > 0 and both search and python were called. Acc of mathematics is 1 or 0, of questions
    answered in words the token F1, the exact match, or what a judge says.
    """

    format_penalty: float = -1.0
    tool_bonus: float = 0.1
    math: Literal["verify", "judge"] = "verify"
    qa: Literal["f1", "exact_match", "judge"] = "f1"

    @property
    def needs_judge(self) -> bool:
        """Whether answers of some kind are judged."""
        return "judge" in (self.math, self.qa)

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """A score for each response; equal answers are graded once."""
        found = [parse_response(response.text) for response in group.responses]
        answers = list(dict.fromkeys(parsed.answer for parsed in found if parsed.answer is not None))
        grades = dict(zip(answers, self._grades(answers, group), strict=True))
        return [self._score(parsed, grades) for parsed in found]

    def _score(self, parsed: Parsed, grades: dict[str, tuple[float, Parts]]) -> Score:
        if parsed.answer is None:
            return Score(self.format_penalty, 0.0, format_ok=False, reason=parsed.reason)
        accuracy, parts = grades[parsed.answer]
        bonus = self.tool_bonus if accuracy > 0.0 and len(parsed.tools) == 2 else 0.0
        reward = max(accuracy + bonus, accuracy)
        return Score(reward, accuracy, format_ok=True, terms={**parts, "tool_bonus": bonus}, answer=parsed.answer)

    def _grades(self, answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Parts]]:
        """Accuracy and parts of each answer."""
        mathematics = group.task.source == "math"
        by_rule = _verified(answers, group) if mathematics else self._in_words(answers, group)
        if (self.math if mathematics else self.qa) != "judge":
            return by_rule
        if group.judge is None:
            raise ValueError("a judge is wanted and there is none")
        task = group.task
        said = group.judge.ask([same_answer(question_text(task), task.ground_truth, answer) for answer in answers])
        return [
            rule if verdict is None else (float(verdict == CORRECT), {**rule[1], "judged": float(verdict == CORRECT)})
            for verdict, rule in zip(said, by_rule, strict=True)
        ]

    def _in_words(self, answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Parts]]:
        truth = group.task.ground_truth
        parts = [{"f1": token_f1(answer, truth), "exact_match": exact_match(answer, truth)} for answer in answers]
        return [(each["exact_match" if self.qa == "exact_match" else "f1"], each) for each in parts]


def _verified(answers: Sequence[str], group: ResponseGroup) -> list[tuple[float, Parts]]:
    grades: list[tuple[float, Parts]] = []
    for verdict in verdicts(answers, group.task.ground_truth):
        right = float(verdict is MathVerdict.EQUAL)
        grades.append((right, {"verified": right, "undecided": float(verdict is MathVerdict.UNDECIDED)}))
    return grades
