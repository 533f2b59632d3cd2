"""Demonstrations for the cold start: how an agent calls tools on a generated task, sometimes carelessly.

A demonstration is a `RolloutTree` with one leaf, cut into segments exactly where sampling would cut it, so supervised
training runs through the same packs as ARPO. Some agents are careless, always within the format: they calculate with
a wrong operator, misspell a name, skip the second hop, or answer something else than the tool said. A model that
imitates them is right only part of the time, which leaves ARPO something to learn.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.generated import MIX, NAME_LETTERS, OPERATORS, Kind, Question, apply
from arpo_megatron.tree import Finish, Role, RolloutTree, ToolRecord

NOTHING_FOUND = "No results found."


class Encoder(Protocol):
    """The part of a transformers tokenizer that demonstrations need."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Chance of each careless act where it can happen."""

    wrong_operator: float  # calc
    misspelt_name: float  # lookup, two
    skipped_hop: float  # two
    ignored_result: float  # every kind

    def of_kind(self, kind: Kind) -> tuple[float, ...]:
        """Chances of the acts that can happen in a task of that kind; they are independent."""
        if kind is Kind.CALC:
            return (self.wrong_operator, self.ignored_result)
        if kind is Kind.LOOKUP:
            return (self.misspelt_name, self.ignored_result)
        return (self.misspelt_name, self.skipped_hop, self.ignored_result)

    @property
    def share(self) -> float:
        """Expected share of demonstrations with at least one careless act, over the mix of generated tasks."""
        total = 0.0
        for kind, weight in MIX.items():
            careful = 1.0
            for chance in self.of_kind(kind):
                careful *= 1.0 - chance
            total += weight * (1.0 - careful)
        return total


_PROPORTIONS = Carelessness(wrong_operator=0.30, misspelt_name=0.20, skipped_hop=0.25, ignored_result=0.20)


def carelessness(share: float) -> Carelessness:
    """Chances in fixed proportions (30 : 20 : 25 : 20) under which about `share` of demonstrations are careless.

    Args:
        share: expected share of demonstrations with at least one careless act, in [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of careless demonstrations must be in [0, 1], not {share}")
    low, high = 0.0, 1.0 / _PROPORTIONS.ignored_result  # at the upper end every result is ignored: share 1
    for _ in range(60):  # `share` rises with the scale: bisection
        middle = (low + high) / 2
        low, high = (middle, high) if _scaled(middle).share < share else (low, middle)
    return _scaled(high)


def _scaled(scale: float) -> Carelessness:
    base = _PROPORTIONS
    return Carelessness(
        min(1.0, scale * base.wrong_operator),
        min(1.0, scale * base.misspelt_name),
        min(1.0, scale * base.skipped_hop),
        min(1.0, scale * base.ignored_result),
    )


def demonstrate(
    tasks: Sequence[Task], facts: Mapping[str, int], tokenizer: Encoder, *, careless: float, seed: int
) -> list[RolloutTree]:
    """One demonstration for each task, with the results that the real tools would give.

    Args:
        tasks: generated tasks; a task given twice gets two independent demonstrations.
        facts: name -> value, the search corpus.
        tokenizer: prompts and segments are encoded with it, each alone and without special tokens added.
        careless: share of demonstrations with at least one careless act, in [0, 1].
        seed: every draw follows from it, the task's id and its position.

    Returns:
        A tree with one leaf for each task, in order.
    """
    chances = carelessness(careless)
    trees = []
    for position, task in enumerate(tasks):
        rng = random.Random(f"demonstration-{seed}-{position}-{task.id}")
        writer = _Writer(task, tokenizer, facts)
        writer.answer(_act(task, writer, chances, rng))
        trees.append(writer.tree)
    return trees


def _act(task: Task, writer: "_Writer", chances: Carelessness, rng: random.Random) -> str:
    """Make the tool calls of one demonstration and return what it answers."""
    question = Question.parse(task.messages[-1]["content"].removesuffix(" ?"))
    if question.kind is Kind.CALC:
        operator = question.operator
        if rng.random() < chances.wrong_operator:
            operator = rng.choice([other for other in OPERATORS if other != operator])
        result = writer.python(question.left, operator, question.right)
    else:
        name = question.name
        if rng.random() < chances.misspelt_name:
            name = name[:-1] + rng.choice([letter for letter in NAME_LETTERS if letter != name[-1]])
        result = writer.search(name)
        if question.kind is Kind.TWO and rng.random() >= chances.skipped_hop:
            result = writer.python(result, question.operator, question.right)
    if rng.random() < chances.ignored_result:
        result = rng.randrange(1000)
    return str(result)


class _Writer:
    """Writes one demonstration into a tree, segment by segment, with the answers of the real tools."""

    def __init__(self, task: Task, tokenizer: Encoder, facts: Mapping[str, int]) -> None:
        prompt_ids = tokenizer.encode(task.prompt_text, add_special_tokens=False)
        self.tree = RolloutTree(task.id, np.array(prompt_ids, np.int32))
        self._tokenizer = tokenizer
        self._facts = facts
        self._last = 0

    def python(self, left: int, operator: str, right: int) -> int:
        """Call python and return the number it answers."""
        code = f"{left}{operator}{right}"
        value = apply(left, operator, right)
        self._call("calculate", "python", code, {"code": code}, str(value))
        return value

    def search(self, name: str) -> int:
        """Search for a name and return its value, 0 where nothing is found."""
        value = self._facts.get(name)
        text = NOTHING_FOUND if value is None else f"Page 1: {name} {value}"
        self._call("look up", "search", name, {"query": name}, text)
        return value or 0

    def answer(self, text: str) -> None:
        """End with an answer, as the sampler would: the closing tag and the end-of-sequence token."""
        content = f"<answer>\\boxed{{{text}}}</answer>{self._tokenizer.eos_token}"
        self._add(Role.MODEL, content, finish=Finish.END)

    def _call(self, thought: str, tool: str, argument: str, arguments: dict[str, str], result: str) -> None:
        model_text = f"<think>{thought}</think><{tool}>{argument}</{tool}>"
        self._add(Role.MODEL, model_text, finish=Finish.TOOL_CALL)
        record = ToolRecord(tool, arguments, "ok", seconds=0.0, cached=False)
        self._add(Role.TOOL, f" <result>\n{result}\n</result>", tool=record)

    def _add(self, role: Role, text: str, *, finish: Finish | None = None, tool: ToolRecord | None = None) -> None:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._last = self.tree.add(self._last, role, ids, finish=finish, tool=tool)
