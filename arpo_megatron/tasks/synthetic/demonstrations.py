"""Demonstrations for the cold start: tool calls that solve a generated task, sometimes with mistakes.

A demonstration is a `RolloutTree` with one leaf, cut into segments exactly where sampling would cut it, so supervised
training runs through the same packs as ARPO. Some demonstrations hold mistakes, always within the format: a wrong
operator, a misspelt name, a skipped second hop, or an answer other than the tool's. A model that imitates them is right
only part of the time, which leaves ARPO something to learn.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.lookup import (
    MIX,
    NAME_LETTERS,
    OPERATORS,
    GeneratedQuestion,
    QuestionKind,
    question_text,
)
from arpo_megatron.tasks.synthetic.writer import Encoder, Writer
from arpo_megatron.tree import RolloutTree

Agent = Callable[[Task, Writer, random.Random], str]
"""Makes the tool calls of one demonstration and returns its answer; every chance is a draw of the generator."""


@dataclass(frozen=True, slots=True)
class LookupMistakes:
    """Chance of each mistake on `generated` tasks, wherever it can happen."""

    wrong_operator: float
    """In calc tasks."""
    misspelt_name: float
    """In lookup and two-hop tasks."""
    skipped_hop: float
    """In two-hop tasks."""
    ignored_result: float
    """In tasks of every kind."""

    def of_kind(self, kind: QuestionKind) -> tuple[float, ...]:
        """Return the chances of the mistakes that can happen in a task of that kind; they are independent."""
        if kind is QuestionKind.CALC:
            return (self.wrong_operator, self.ignored_result)
        if kind is QuestionKind.LOOKUP:
            return (self.misspelt_name, self.ignored_result)
        return (self.misspelt_name, self.skipped_hop, self.ignored_result)

    @property
    def share(self) -> float:
        """Expected share of demonstrations with at least one mistake, over the mix of generated tasks."""
        total = 0.0
        for kind, weight in MIX.items():
            correct = 1.0
            for chance in self.of_kind(kind):
                correct *= 1.0 - chance
            total += weight * (1.0 - correct)
        return total


_PROPORTIONS = LookupMistakes(wrong_operator=0.30, misspelt_name=0.20, skipped_hop=0.25, ignored_result=0.20)


def lookup_mistakes(share: float) -> LookupMistakes:
    """Return chances in fixed proportions (30 : 20 : 25 : 20) with which about `share` of demonstrations have a
    mistake.

    Args:
        share: expected share of demonstrations with at least one mistake, in [0, 1].
    """
    # At the largest scale every result is ignored: share 1.
    return _scaled(scale_for(share, lambda scale: _scaled(scale).share, most=1.0 / _PROPORTIONS.ignored_result))


def scale_for(share: float, share_of: Callable[[float], float], *, most: float) -> float:
    """Find the scale in [0, most] at which the increasing function `share_of` equals `share`; ValueError outside [0,
    1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of demonstrations with mistakes must be in [0, 1], not {share}")
    low, high = 0.0, most
    for _ in range(60):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if share_of(middle) < share else (low, middle)
    return high


def _scaled(scale: float) -> LookupMistakes:
    base = _PROPORTIONS
    return LookupMistakes(
        min(1.0, scale * base.wrong_operator),
        min(1.0, scale * base.misspelt_name),
        min(1.0, scale * base.skipped_hop),
        min(1.0, scale * base.ignored_result),
    )


def calculator_agent(mistake_share: float) -> Agent:
    """Return an agent for `generated` tasks; about `mistake_share` of its demonstrations have a mistake."""
    return partial(_calculate, lookup_mistakes(mistake_share))


def demonstrate(
    tasks: Sequence[Task],
    facts: Mapping[str, str],
    tokenizer: Encoder,
    *,
    mistake_share: float,
    seed: int,
    agent: Callable[[float], Agent] = calculator_agent,
) -> list[RolloutTree]:
    """Make one demonstration per task, with the results that the real tools would give.

    Args:
        tasks: generated tasks; a task given twice gets two independent demonstrations.
        facts: name -> text of its page, the search corpus.
        tokenizer: encodes prompts and segments, each alone and without special tokens.
        mistake_share: share of demonstrations with at least one mistake, in [0, 1].
        seed: every draw follows from it, the task's id and its position.
        agent: share of mistakes -> agent that makes the demonstrations; it must know this family of tasks.

    Returns:
        A tree with one leaf per task, in order.
    """
    act = agent(mistake_share)
    trees = []
    for position, task in enumerate(tasks):
        rng = random.Random(f"demonstration-{seed}-{position}-{task.id}")
        writer = Writer(task, tokenizer, facts)
        writer.answer(act(task, writer, rng))
        trees.append(writer.tree)
    return trees


def _calculate(chances: LookupMistakes, task: Task, writer: Writer, rng: random.Random) -> str:
    question = GeneratedQuestion.parse(question_text(task))
    if question.kind is QuestionKind.CALC:
        operator = question.operator
        if rng.random() < chances.wrong_operator:
            operator = rng.choice([other for other in OPERATORS if other != operator])
        result = writer.python(question.left, operator, question.right)
    else:
        name = question.name
        if rng.random() < chances.misspelt_name:
            name = name[:-1] + rng.choice([letter for letter in NAME_LETTERS if letter != name[-1]])
        result = int(writer.search(name) or 0)
        if question.kind is QuestionKind.TWO and rng.random() >= chances.skipped_hop:
            result = writer.python(result, question.operator, question.right)
    if rng.random() < chances.ignored_result:
        result = rng.randrange(1000)
    return str(result)
