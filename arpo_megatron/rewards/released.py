r"""The scorer of the authors' released code, errors included, so that published runs can be compared.

It grades mathematics by token F1 without punctuation ("6" and "-6" are equal, "\frac12" and "\dfrac12" are not), counts
tags anywhere in the text, tool results included, and accepts a made-up <result>.
"""

from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score
from arpo_megatron.rewards.qa import best, token_f1
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.tags.response import last_boxed

_SPACED_BOX = "\\boxed "


@dataclass(frozen=True, slots=True)
class ReleasedReward:
    """Token F1 of the boxed answer, plus `tool_bonus` if F1 is positive and the tags of both tools occur.

    This is what the released code of ARPO (arXiv 2507.19849) computes instead of eq. 8.
    """

    needs_judge: ClassVar[bool] = False
    format_penalty: float = -1.0
    tool_bonus: float = 0.1

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Score each response as the released code does."""
        return [self._score(response.text, group.task) for response in group.responses]

    def _score(self, response: str, task: Task) -> Score:
        reason = _broken_rule(response)
        start, end = response.find("<answer>"), response.find("</answer>")
        answer = None if reason else _boxed(response[start:end])
        if answer is None:
            return Score(self.format_penalty, 0.0, format_ok=False, reason=reason or "\\boxed{} is not closed")
        f1 = best(token_f1, answer, task.answers)
        both = "</search>" in response and "</python>" in response
        bonus = self.tool_bonus if f1 > 0.0 and both else 0.0
        return Score(f1 + bonus, f1, format_ok=True, terms={"f1": f1, "tool_bonus": bonus}, answer=answer)


def _boxed(answer: str) -> str | None:
    """Return what the released code reads as the boxed text; None if it fails.

    A box with a space after its command goes before all others, and reaches to the next dollar sign.
    """
    if _SPACED_BOX in answer:
        return answer.rpartition(_SPACED_BOX)[2].partition("$")[0]
    box = answer[answer.rfind("\\boxed") :]
    return last_boxed(box) if box.startswith("\\boxed{") else None


def _broken_rule(text: str) -> str:
    """Return the first rule of the released check that is broken, or an empty string."""
    if text.count("<think>") == 0 or text.count("<think>") != text.count("</think>"):
        return "<think> is not paired"
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "not exactly one answer"
    for tool in ("search", "python"):
        if not _every_call_has_a_result(text, tool):
            return f"<{tool}> without a <result>"
    answer = text[text.find("<answer>") : text.find("</answer>")]
    return "" if "\\boxed{" in answer and "}" in answer else "no \\boxed{} in the answer"


def _every_call_has_a_result(text: str, tool: str) -> bool:
    """Whether every <tool> is followed by </tool>, <result> and </result> in this order, with any text between them."""
    position = text.find(f"<{tool}>")
    while position >= 0:
        for tag in (f"</{tool}>", "<result>", "</result>"):
            following = text.find(tag, position)
            if following < 0 or (tag == f"</{tool}>" and 0 <= text.find("<result>", position) < following):
                return False
            position = following
        position = text.find(f"<{tool}>", position)
    return True
