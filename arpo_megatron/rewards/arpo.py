"""ARPO's hierarchical reward (arXiv 2507.19849): format gate, accuracy of the answer, bonus for using both tools."""

from dataclasses import dataclass

from arpo_megatron.rewards.base import Score
from arpo_megatron.rewards.qa import exact_match, token_f1
from arpo_megatron.rewards.tag_format import parse_response
from arpo_megatron.rewards.verify import math_equal
from arpo_megatron.tasks.base import Task


@dataclass(frozen=True, slots=True)
class ArpoReward:
    """R = max(Acc + r_M, Acc) where the format is kept, else `format_penalty`.

    Acc is 1 or 0 for mathematics (math-verify) and the token F1 for questions answered in words; r_M is `tool_bonus`
    where Acc > 0 and both search and python were called.
    """

    format_penalty: float = -1.0
    tool_bonus: float = 0.1

    def score_text(self, response: str, task: Task) -> Score:
        """Score the decoded text after the prompt."""
        parsed = parse_response(response)
        if parsed.answer is None:
            return Score(self.format_penalty, 0.0, format_ok=False, reason=parsed.reason)
        parts: dict[str, float] = {}
        if task.source == "math":
            accuracy = parts["verified"] = float(math_equal(parsed.answer, task.ground_truth))
        else:
            accuracy = parts["f1"] = token_f1(parsed.answer, task.ground_truth)
            parts["exact_match"] = exact_match(parsed.answer, task.ground_truth)
        bonus = parts["tool_bonus"] = self.tool_bonus if accuracy > 0.0 and len(parsed.tools) == 2 else 0.0
        return Score(max(accuracy + bonus, accuracy), accuracy, format_ok=True, parts=parts, answer=parsed.answer)
