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
from dataclasses import astuple, dataclass
from functools import partial
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import Agent, scale_for
from arpo_megatron.tasks.synthetic.lookup import (
    MOST_NAMES,
    NAME_LENGTH,
    NAME_LETTERS,
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
_QUESTION = re.compile(r"(?P<name>[a-z]{4}) (?P<hops>[1-9]) \+(?P<addend>\d\d)")


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


@dataclass(frozen=True, slots=True)
class TrailMistakes:
    """Chance of each mistake wherever it can happen; independent, and all but the last follow a tool result."""

    stopped: float
    """After a page that is not the last: take its number."""
    one_more: float
    """After the last page: read another one."""
    wrong_addend: float
    """In the calculation: add another number."""
    ignored: float
    """After the calculation: answer with the page's number."""
    misspelt: float = 0.0
    """Before the first result: search a misspelt name, find nothing, and answer 0."""

    def share_of(self, hops: int) -> float:
        """Return the expected share of demonstrations with a mistake at a level."""
        correct = (1.0 - self.misspelt) * (1.0 - self.stopped) ** (hops - 1) * (1.0 - self.one_more)
        return 1.0 - correct * (1.0 - self.wrong_addend) * (1.0 - self.ignored)

    def scaled(self, scale: float) -> "TrailMistakes":
        """Return the chances times `scale`, at most 1 each."""
        return TrailMistakes(*(min(1.0, scale * chance) for chance in astuple(self)))


@dataclass(frozen=True, slots=True)
class TrailFamily:
    """Trails of some lengths, and where the demonstrations of the cold start are careless."""

    levels: tuple[int, ...]
    """Numbers of pages to read, the largest last."""
    mistakes: TrailMistakes
    """Chances of mistakes in proportion."""

    def generate(self, seed: int, train: int, held_out: int) -> GeneratedTasks:
        """Generate `train` + `held_out` tasks from a seed, with different names in each.

        The held-out tasks are drawn first and the training tasks in order, so a larger `train` only appends.

        Raises:
            UserError: more tasks than there are names.
        """
        most = MOST_NAMES // self._ring
        if train + held_out > most:
            raise UserError(f"data.tasks + data.held_out = {train + held_out}: trails have names for {most} at most")
        rng, facts = random.Random(f"trails-{seed}"), dict[str, str]()
        held = tuple(self._draw(rng, facts, f"held-out-{index}") for index in range(held_out))
        return GeneratedTasks(tuple(self._draw(rng, facts, f"train-{index}") for index in range(train)), held, facts)

    @property
    def _ring(self) -> int:
        """Names of a trail; the last leads to the first, so that one page too many can be read."""
        return self.levels[-1] + 1

    def _draw(self, rng: random.Random, facts: dict[str, str], task_id: str) -> Task:
        names = []
        for _ in range(self._ring):
            names.append(fresh_name(rng, facts))
            facts[names[-1]] = ""  # taken
        for name, onward in zip(names, [*names[1:], names[0]], strict=True):
            facts[name] = f"{onward}{rng.choice(VALUES)}"
        trail = Trail(names[0], rng.choice(self.levels), rng.choice(OPERANDS))
        return generated_task(f"{task_id}-hops{trail.hops}", trail.text, trail.solve(facts), "math")

    def chances(self, share: float) -> TrailMistakes:
        """Return chances in the family's proportions with which about `share` of demonstrations have a mistake."""
        most = 1.0 / max(self.mistakes.one_more, self.mistakes.misspelt)  # share 1 at every level
        return self.mistakes.scaled(scale_for(share, lambda scale: self.share(self.mistakes.scaled(scale)), most=most))

    def share(self, chances: TrailMistakes) -> float:
        """Return the expected share of demonstrations with a mistake over all levels."""
        return sum(map(chances.share_of, self.levels)) / len(self.levels)

    def agent(self, mistake_share: float) -> Agent:
        """Return an agent for these trails; about `mistake_share` of its demonstrations have a mistake."""
        return partial(_follow, self.chances(mistake_share))


TRAILS = TrailFamily(LEVELS, TrailMistakes(stopped=0.30, one_more=0.25, wrong_addend=0.15, ignored=0.15))
"""The family of the studies: every tool result requires a decision at which the demonstrations are careless."""
LONG_TRAILS = TrailFamily((5,), TrailMistakes(stopped=0.0, one_more=0.25, wrong_addend=0.15, ignored=0.15))
"""Five careful reads, then three careless decisions: calls dominate the cost, and early forks are wasted."""
EARLY_TRAILS = TrailFamily(LEVELS, TrailMistakes(0.0, 0.0, 0.0, 0.0, misspelt=1.0))
"""All mistakes come before the first tool result, where ARPO does not fork."""


def _follow(chances: TrailMistakes, task: Task, writer: Writer, rng: random.Random) -> str:
    trail = Trail.parse(question_text(task))
    name, value = trail.name, 0
    if chances.misspelt and rng.random() < chances.misspelt:
        place = rng.randrange(NAME_LENGTH)
        other = rng.choice([letter for letter in NAME_LETTERS if letter != name[place]])
        name = name[:place] + other + name[place + 1 :]
        if writer.search(name) is None:
            return "0"
    for hop in range(1, trail.hops + 2):
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
