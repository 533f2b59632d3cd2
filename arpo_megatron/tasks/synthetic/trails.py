"""Trails: generated tasks in which every tool result requires a decision.

The page of a name holds another name and a number: "Page 1: qzlf brtk417". A question gives the name where a trail
starts, the number of pages to read, and a number to add to that of the last page:

    "qzlf 2 +56"   search qzlf (-> brtk), search brtk (-> 233, for example), python 233+56, answer 289

All pages look alike, so no page shows whether the trail ends there. Only the question and the searches made so far do:
after each result the agent must count, then choose between another search and the calculation, and which name or number
to copy. The levels are one, two and three pages.

The task is hard. A guessed answer is right about once in a thousand times, and an agent that skips one search, makes
one too many, or answers with the page's number is always wrong: there is no partial credit. The demonstrations of the
cold start have mistakes at exactly these decisions, after tool results and nowhere else. So a policy that imitates them
is uncertain there, more often on longer trails. Held-out trails use names that no training task has.

The name of the next page is written together with the number ("brtk417"), so that a search index takes both for one
word and a search for brtk finds only brtk's page.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import Agent, scale_for
from arpo_megatron.tasks.synthetic.lookup import (
    MOST_NAMES,
    NAME_LENGTH,
    OPERANDS,
    VALUES,
    GeneratedTasks,
    fresh_name,
    generated_task,
    question_text,
)
from arpo_megatron.tasks.synthetic.writer import Writer

LEVELS = (1, 2, 3)
"""Numbers of pages to read; each level has a third of the tasks."""
_RING = LEVELS[-1] + 1  # names of a trail; the last leads to the first, so that one page too many can be read
_QUESTION = re.compile(r"(?P<name>[a-z]{4}) (?P<hops>[123]) \+(?P<addend>\d\d)")


@dataclass(frozen=True, slots=True)
class Trail:
    """The question of a task: read `hops` pages from that of `name`, and add `addend` to the last one's number."""

    name: str
    hops: int
    addend: int

    @property
    def text(self) -> str:
        """The question as the prompt shows it, e.g. "qzlf 2 +56"."""
        return f"{self.name} {self.hops} +{self.addend}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a `text`. Raises ValueError if it is not such a question."""
        if (match := _QUESTION.fullmatch(text)) is None:
            raise ValueError(f"not a question about a trail: {text!r}")
        return cls(match["name"], int(match["hops"]), int(match["addend"]))

    def solve(self, facts: Mapping[str, str]) -> int:
        """Return the right answer. Raises KeyError for a name without a page."""
        name, value = self.name, 0
        for _ in range(self.hops):
            name, value = read_page(facts[name])
        return value + self.addend


def read_page(fact: str) -> tuple[str, int]:
    """Split the text of a page, "brtk417", into the next name and the number."""
    return fact[:NAME_LENGTH], int(fact[NAME_LENGTH:])


def generate(seed: int, train: int, held_out: int) -> GeneratedTasks:
    """Generate `train` + `held_out` tasks from a seed, with different names in each.

    The held-out tasks are drawn first and the training tasks in order, so a larger `train` only appends.

    Raises:
        UserError: more tasks than there are names.
    """
    if _RING * (train + held_out) > MOST_NAMES:
        raise UserError(
            f"data.tasks + data.held_out = {train + held_out}: trails have names for {MOST_NAMES // _RING} at most"
        )
    rng, facts = random.Random(f"trails-{seed}"), dict[str, str]()
    held = tuple(_draw(rng, facts, f"held-out-{index}") for index in range(held_out))
    return GeneratedTasks(tuple(_draw(rng, facts, f"train-{index}") for index in range(train)), held, facts)


def _draw(rng: random.Random, facts: dict[str, str], task_id: str) -> Task:
    names = []
    for _ in range(_RING):
        names.append(fresh_name(rng, facts))
        facts[names[-1]] = ""  # taken
    for name, onward in zip(names, [*names[1:], names[0]], strict=True):
        facts[name] = f"{onward}{rng.choice(VALUES)}"
    trail = Trail(names[0], rng.choice(LEVELS), rng.choice(OPERANDS))
    return generated_task(f"{task_id}-hops{trail.hops}", trail.text, trail.solve(facts), "math")


@dataclass(frozen=True, slots=True)
class TrailMistakes:
    """Chance of each mistake wherever it can happen; each follows a tool result, and they are independent."""

    stopped: float
    """After a page that is not the last: take its number."""
    one_more: float
    """After the last page: read another one."""
    wrong_addend: float
    """In the calculation: add another number."""
    ignored: float
    """After the calculation: answer with the page's number."""

    def share_of(self, hops: int) -> float:
        """Return the expected share of demonstrations with a mistake at a level."""
        correct = (1.0 - self.stopped) ** (hops - 1) * (1.0 - self.one_more) * (1.0 - self.wrong_addend)
        return 1.0 - correct * (1.0 - self.ignored)

    @property
    def share(self) -> float:
        """Expected share of demonstrations with a mistake over all levels."""
        return sum(map(self.share_of, LEVELS)) / len(LEVELS)


_PROPORTIONS = TrailMistakes(stopped=0.30, one_more=0.25, wrong_addend=0.15, ignored=0.15)


def trail_mistakes(share: float) -> TrailMistakes:
    """Return chances in fixed proportions (30 : 25 : 15 : 15) with which about `share` of demonstrations have a
    mistake.
    """
    most = 1.0 / _PROPORTIONS.one_more  # every last page is then followed by another: share 1
    return _scaled(scale_for(share, lambda scale: _scaled(scale).share, most=most))


def _scaled(scale: float) -> TrailMistakes:
    base = _PROPORTIONS
    chances = (base.stopped, base.one_more, base.wrong_addend, base.ignored)
    return TrailMistakes(*(min(1.0, scale * chance) for chance in chances))


def trail_agent(mistake_share: float) -> Agent:
    """Return an agent for trails; about `mistake_share` of its demonstrations have a mistake."""
    return partial(_follow, trail_mistakes(mistake_share))


def _follow(chances: TrailMistakes, task: Task, writer: Writer, rng: random.Random) -> str:
    trail = Trail.parse(question_text(task))
    name, value = trail.name, 0
    for hop in range(1, _RING + 1):
        name, value = read_page(writer.search(name) or "")
        if hop > trail.hops or (hop == trail.hops and rng.random() >= chances.one_more):
            break
        if hop < trail.hops and rng.random() < chances.stopped:
            break
    addend = trail.addend
    if rng.random() < chances.wrong_addend:
        addend = rng.choice([other for other in OPERANDS if other != addend])
    result = writer.python(value, "+", addend)
    return str(value if rng.random() < chances.ignored else result)
