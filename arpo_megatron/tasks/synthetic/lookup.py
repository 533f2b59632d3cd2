"""Generated tasks that can only be solved by calling a tool and using its answer.

Three kinds, which a tiny model learns in minutes:

    calc     "12*34"     needs python: the model is too small to multiply
    lookup   "qzlf"      needs search: the value of a name is only in the corpus
    two      "qzlf+56"   needs both, one after the other

Held-out tasks use names and operand pairs that no training task contains. So success there means that the model calls
tools and copies results, not that it remembers.
"""

import json
import random
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task

OPERATORS = "+-*"
NAME_LETTERS = "bcdfghjklmnpqrstvwxz"
"""No vowels, so that a random name is never an English word that a search index treats specially (stop words, stems).
"""
NAME_LENGTH = 4
OPERANDS = range(11, 100)
VALUES = range(100, 1000)

MOST_NAMES = len(NAME_LETTERS) ** NAME_LENGTH // 2
"""Half of all names: beyond that, drawing unused ones becomes slow."""
_END = " ?"
_MOST_HELD_OUT_PAIRS = len(OPERANDS) ** 2 // 2
_QUESTION = re.compile(r"(?:(?P<name>[a-z]{4})|(?P<left>\d\d))(?:(?P<operator>[-+*])(?P<right>\d\d))?")


class QuestionKind(StrEnum):
    """The tools that a generated task needs."""

    CALC = "calc"  # python
    LOOKUP = "lookup"  # search
    TWO = "two"  # search, then python


MIX: Mapping[QuestionKind, float] = {QuestionKind.CALC: 0.4, QuestionKind.LOOKUP: 0.3, QuestionKind.TWO: 0.3}
"""Share of each kind."""


@dataclass(frozen=True, slots=True)
class GeneratedQuestion:
    """The question of a generated task: `left operator right`, `name`, or `name operator right`."""

    kind: QuestionKind
    name: str = ""
    left: int = 0
    operator: str = ""
    right: int = 0

    @property
    def text(self) -> str:
        """The question as the prompt shows it, e.g. "12*34"."""
        if self.kind is QuestionKind.LOOKUP:
            return self.name
        return f"{self.left if self.kind is QuestionKind.CALC else self.name}{self.operator}{self.right}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a `text`. Raises ValueError if it is not such a question."""
        match = _QUESTION.fullmatch(text)
        if match is None or (match["left"] and not match["operator"]):
            raise ValueError(f"not a generated question: {text!r}")
        if match["left"]:
            return cls(
                QuestionKind.CALC, left=int(match["left"]), operator=match["operator"], right=int(match["right"])
            )
        if not match["operator"]:
            return cls(QuestionKind.LOOKUP, name=match["name"])
        return cls(QuestionKind.TWO, name=match["name"], operator=match["operator"], right=int(match["right"]))


@dataclass(frozen=True, slots=True)
class GeneratedTasks:
    """Training and held-out tasks with the facts that answer them (name -> text of its page, e.g. "417")."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    facts: Mapping[str, str]

    def write_corpus(self, path: Path) -> None:
        """Write the facts as a search corpus, one {"text": "qzlf 417"} per line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": f"{name} {fact}"}) for name, fact in self.facts.items())
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def generate(seed: int, train: int, held_out: int) -> GeneratedTasks:
    """Generate `train` + `held_out` tasks from a seed: 40 % calc, 30 % lookup and 30 % two-hop.

    The held-out tasks are drawn first and the training tasks in order, so a larger `train` only appends.

    Raises:
        UserError: more tasks than there are names or operand pairs.
    """
    if train + held_out > MOST_NAMES:
        raise UserError(
            f"data.tasks + data.held_out = {train + held_out}: generated tasks have names for {MOST_NAMES} at most"
        )
    if held_out > _MOST_HELD_OUT_PAIRS:
        raise UserError(
            f"data.held_out={held_out}: generated tasks keep at most {_MOST_HELD_OUT_PAIRS} operand pairs apart"
        )
    source = _Source(random.Random(f"generated-tasks-{seed}"))
    held = tuple(source.draw(f"held-out-{index}", held_out=True) for index in range(held_out))
    trained = tuple(source.draw(f"train-{index}", held_out=False) for index in range(train))
    return GeneratedTasks(trained, held, source.facts)


def fresh_name(rng: random.Random, taken: Container[str]) -> str:
    """Return a name that is not `taken`."""
    while True:
        name = "".join(rng.choices(NAME_LETTERS, k=NAME_LENGTH))
        if name not in taken:
            return name


def question_text(task: Task) -> str:
    """Return the question of a generated task as it was written, e.g. "12*34"."""
    return task.messages[-1]["content"].removesuffix(_END)


def generated_task(task_id: str, text: str, truth: int, source: str) -> Task:
    """Build the task that asks a generated question."""
    return Task(
        id=task_id,
        messages=({"role": "user", "content": text + _END},),
        ground_truth=str(truth),
        source=source,
        prompt_text=prompt(text),
    )


def prompt(text: str) -> str:
    """Return a question as the model is prompted with it."""
    return f"question: {text}{_END}"


def solve(question: GeneratedQuestion, facts: Mapping[str, str]) -> int:
    """Return the right answer. Raises KeyError for a name without a fact."""
    if question.kind is QuestionKind.LOOKUP:
        return int(facts[question.name])
    left = question.left if question.kind is QuestionKind.CALC else int(facts[question.name])
    return apply(left, question.operator, question.right)


def apply(left: int, operator: str, right: int) -> int:
    """Return `left operator right` for one of `OPERATORS`."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    raise ValueError(f"unknown operator {operator!r}")


class _Source:
    """Draws tasks without using a name twice or a held-out operand pair in training."""

    def __init__(self, rng: random.Random) -> None:
        self.facts: dict[str, str] = {}
        self._rng = rng
        self._held_out_pairs: set[tuple[int, int]] = set()

    def draw(self, task_id: str, *, held_out: bool) -> Task:
        kind = self._rng.choices(list(MIX), weights=list(MIX.values()))[0]
        if kind is QuestionKind.CALC:
            left, right = self._pair(held_out)
            question = GeneratedQuestion(kind, left=left, operator=self._rng.choice(OPERATORS), right=right)
        elif kind is QuestionKind.LOOKUP:
            question = GeneratedQuestion(kind, name=self._name())
        else:
            question = GeneratedQuestion(kind, name=self._name(), operator="+", right=self._rng.choice(OPERANDS))
        source = "qa" if kind is QuestionKind.LOOKUP else "math"
        return generated_task(f"{task_id}-{kind.value}", question.text, solve(question, self.facts), source)

    def _pair(self, held_out: bool) -> tuple[int, int]:
        while True:
            pair = (self._rng.choice(OPERANDS), self._rng.choice(OPERANDS))
            if pair in self._held_out_pairs:
                continue
            if held_out:
                self._held_out_pairs.add(pair)
            return pair

    def _name(self) -> str:
        name = fresh_name(self._rng, self.facts)
        self.facts[name] = str(self._rng.choice(VALUES))
        return name
