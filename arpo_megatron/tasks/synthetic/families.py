"""Families of generated tasks by the name that `data.kind` gives them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arpo_megatron.tasks.synthetic import demonstrations, trails
from arpo_megatron.tasks.synthetic import lookup as generated
from arpo_megatron.tasks.synthetic.demonstrations import Agent
from arpo_megatron.tasks.synthetic.lookup import GeneratedTasks


@dataclass(frozen=True, slots=True)
class Family:
    """A family of tasks that are made from a seed.

    Attributes:
        generate: seed, training tasks, held-out tasks -> the tasks and their search corpus.
        agent: share of careless demonstrations -> who makes those of the cold start.
    """

    generate: Callable[[int, int, int], GeneratedTasks]
    agent: Callable[[float], Agent]


FAMILIES: Mapping[str, Family] = {
    "generated": Family(generated.generate, demonstrations.calculator_agent),
    "trails": Family(trails.generate, trails.trail_agent),
}
