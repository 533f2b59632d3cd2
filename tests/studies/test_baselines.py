"""Untrained agents are far from the ceiling on the tasks of the studies (shares: docs/guides/studies.md)."""

import random
from collections.abc import Mapping
from statistics import mean

import pytest

from arpo_megatron.jobs.resolve import resolve
from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import Agent
from arpo_megatron.tasks.synthetic.lookup import question_text
from arpo_megatron.tasks.synthetic.trails import LEVELS, TRAILS, Trail, read_page
from arpo_megatron.tasks.synthetic.writer import Writer

CONFIG = resolve("trails")
CALLS = CONFIG.rollout.max_tool_calls
CARELESS = CONFIG.sft.mistake_share


def random_actions(task: Task, writer: Writer, rng: random.Random) -> str:
    """Draw each action: search for a known name, add the addend to the last number, or answer with it."""
    trail = Trail.parse(question_text(task))
    names = [trail.name]
    onward, number = read_page(writer.search(trail.name) or "")
    for _ in range(CALLS - 1):
        match rng.choice(("search", "calculate", "answer")):
            case "search":
                names.append(onward)
                onward, number = read_page(writer.search(rng.choice(names)) or "")
            case "calculate":
                number = writer.python(number, "+", trail.addend)
            case _:
                break
    return str(number)


def random_length(task: Task, writer: Writer, rng: random.Random) -> str:
    """Follow the trail correctly, but for a random number of pages."""
    trail = Trail.parse(question_text(task))
    name, number = trail.name, 0
    for _ in range(rng.choice(LEVELS)):
        name, number = read_page(writer.search(name) or "")
    return str(writer.python(number, "+", trail.addend))


AGENTS: Mapping[str, tuple[Agent, object]] = {
    "random actions": (random_actions, pytest.approx(0.075, abs=0.05)),
    "random number of pages": (random_length, pytest.approx(1 / 3, abs=0.1)),
    "demonstrations of the cold start": (TRAILS.agent(CARELESS), pytest.approx(1 - CARELESS, abs=0.1)),
    "careful": (TRAILS.agent(0.0), 1.0),
}


@pytest.mark.parametrize("name", AGENTS)
def test_untrained_agents_solve_a_known_share(name: str) -> None:
    agent, expected = AGENTS[name]
    made, tokenizer, rng = TRAILS.generate(1, train=0, held_out=300), generated_tokenizer(), random.Random(1)
    solved = {level: list[bool]() for level in LEVELS}
    for task in made.held_out:
        answer = agent(task, Writer(task, tokenizer, made.facts), rng)
        solved[Trail.parse(question_text(task)).hops].append(answer == task.ground_truth)
    assert mean(map(mean, solved.values())) == expected
