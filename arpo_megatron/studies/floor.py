"""How far agents that have learnt nothing are from the ceiling on trails: `python -m arpo_megatron.studies.floor`.

Tags and copying are given to each of them, as to the policies after the cold start; what they lack is the course.
"""

import random
from collections.abc import Mapping

from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import Agent
from arpo_megatron.tasks.synthetic.lookup import question_text
from arpo_megatron.tasks.synthetic.trails import LEVELS, Trail, generate, read_page, trail_agent
from arpo_megatron.tasks.synthetic.writer import Writer

CALLS = 5
"""Tool calls at most, as in the recipe."""
CARELESS = 0.6
"""Share of careless demonstrations for the cold start, as in the recipe."""


def at_random(task: Task, writer: Writer, rng: random.Random) -> str:
    """Every next act is a draw: search for a name it has seen, add the addend to the last number, or answer with it."""
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


def counting_at_random(task: Task, writer: Writer, rng: random.Random) -> str:
    """Does all rightly, but how many pages it reads is a draw."""
    trail = Trail.parse(question_text(task))
    name, number = trail.name, 0
    for _ in range(rng.choice(LEVELS)):
        name, number = read_page(writer.search(name) or "")
    return str(writer.python(number, "+", trail.addend))


AGENTS: Mapping[str, Agent] = {
    "random acts": at_random,
    "right acts, random number of pages": counting_at_random,
    "demonstrations of the cold start": trail_agent(CARELESS),
    "careful": trail_agent(0.0),
}


def solved(agent: Agent, tasks: int, seed: int = 1) -> dict[int, float]:
    """Share of right answers of an agent at each level, over so many held-out tasks in all."""
    made, tokenizer = generate(seed, train=0, held_out=tasks), generated_tokenizer()
    rng, right = random.Random(seed), {level: list[bool]() for level in LEVELS}
    for task in made.held_out:
        answer = agent(task, Writer(task, tokenizer, made.facts), rng)
        right[Trail.parse(question_text(task)).hops].append(answer == task.ground_truth)
    return {level: sum(answers) / len(answers) for level, answers in right.items()}


def main(tasks: int = 2000) -> None:
    """Print a row an agent: the mean over levels, then each level."""
    print("| agent | right |", " | ".join(f"hops{level}" for level in LEVELS), "|")
    print("| --- " * (2 + len(LEVELS)) + "|")
    for name, agent in AGENTS.items():
        shares = solved(agent, tasks)
        row = [sum(shares.values()) / len(shares), *shares.values()]
        print(f"| {name} |", " | ".join(f"{share:.1%}" for share in row), "|")


if __name__ == "__main__":
    main()
