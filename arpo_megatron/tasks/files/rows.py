r"""Rows of question files: messages with a `reward_model` (verl and the released ARPO files), or question and answer.

The system prompts of the released files have a literal backspace in place of the backslash of "\boxed"; reading
repairs it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.tags.response import last_boxed
from arpo_megatron.utils.table_reader import BadRowError

QUESTION = ("prompt", "messages", "question", "problem", "Question", "query")
ANSWER = ("golden_answers", "reward_model.ground_truth", "answer", "ground_truth", "Answer", "solution")
KIND = ("ability", "data_source")
HINT = ("hint", "solution_hint")
COLUMNS = ("question", "answer", "kind", "hint")
"""Names that `data.columns` maps to a column of the file."""
_MATHEMATICS = re.compile(r"math|gsm8k|aime", re.IGNORECASE)
_NUMBER = r"[-+\u2212]?(?:\d[\d.,]*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER_OR_LATEX = re.compile(
    rf"(?:[a-z]\s*=\s*)?{_NUMBER}(?:\s*/\s*{_NUMBER})?\s*%?"  # 7, -1,000.5, 3/4, 1e-5, x = 2, 5 %
    rf"|[(\[]\s*{_NUMBER}(?:\s*,\s*{_NUMBER})*\s*[)\]]"  # (1, 2)
    r"|.*[\\$^].*|.*sqrt.*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Finds question, answer and kind in a row."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Column of the file for some of `COLUMNS` (`data.columns`); a dot leads into an object."""
    verifier: Literal["math", "qa"] | None = None
    """How answers are verified without a column of kinds (`data.verifier`)."""

    def read(self, row: Any) -> tuple[tuple[Message, ...], tuple[str, ...], str]:
        """Return messages, right answers (at least one), and "math" or "qa". Raises BadRowError."""
        if not isinstance(row, dict):
            raise BadRowError("the row is not an object")
        messages = _messages(self._value(row, "question", QUESTION))
        answers = _answers(self._value(row, "answer", ANSWER))
        return messages, answers, self._kind(row, answers)

    def hint(self, row: Mapping[str, Any]) -> str:
        """Return the worked solution of a row; "" if it has none. Raises BadRowError if it is no text."""
        named = self.names.get("hint")
        found = next((value for name in ((named,) if named else HINT) if (value := _get(row, name)) is not None), "")
        if not isinstance(found, str):
            raise BadRowError("the hint is no text")
        return found.strip()

    def _value(self, row: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Any:
        tried = (self.names[name],) if name in self.names else known
        for column in tried:
            if (value := _get(row, column)) is not None:
                return value
        if any(_has(row, column) for column in tried):
            return None  # the column exists, and is empty here
        raise BadRowError(
            f"no column {' or '.join(tried)}; it has: {', '.join(map(str, row))}; set data.columns.{name}=COLUMN"
        )

    def _kind(self, row: Mapping[str, Any], answers: Sequence[str]) -> str:
        named = (self.names["kind"],) if "kind" in self.names else KIND
        kind = next((value for name in named if (value := _get(row, name))), None)
        if kind is not None:
            return "math" if _MATHEMATICS.search(str(kind)) else "qa"
        if self.verifier is not None:
            return self.verifier
        return "math" if all(map(_NUMBER_OR_LATEX.fullmatch, answers)) else "qa"


def _get(row: Any, column: str) -> Any:
    for part in column.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _has(row: Any, column: str) -> bool:
    """Return whether the row has the column. Below a null, every column may exist."""
    for part in column.split("."):
        if row is None:
            return True
        if not isinstance(row, dict) or part not in row:
            return False
        row = row[part]
    return True


def _messages(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(turn, dict) for turn in prompt):
        raise BadRowError("the question is neither text nor a list of messages")
    messages: list[Message] = []
    for turn in prompt:
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRowError("a message without role or content")
        messages.append({"role": role, "content": content.replace("\x08oxed", "\\boxed")})
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise BadRowError("the question is empty")
    return tuple(messages)


def _answers(found: Any) -> tuple[str, ...]:
    """Return the answer of text or number, or all different ones of a list. Raises BadRowError if there is none."""
    given = found if isinstance(found, list) else [found]
    answers = dict.fromkeys(_answer(each) for each in given if not _is_missing(each))
    if not answers:
        raise BadRowError("the answer is missing")
    return tuple(answers)


def _is_missing(found: Any) -> bool:
    return found is None or found == "" or (isinstance(found, float) and math.isnan(found))


def _answer(found: Any) -> str:
    """Return the answer of text or number, or the final answer of a worked solution."""
    if isinstance(found, bool):
        found = "yes" if found else "no"
    if isinstance(found, int | float):
        found = str(found)
    if not isinstance(found, str) or not found.strip():
        raise BadRowError("the answer is missing")
    if "\n#### " in found:  # GSM8K
        return found.rpartition("#### ")[2].strip()
    return (last_boxed(found) or found).strip()
