"""Families of generated tasks by their name in `data.kind`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arpo_megatron.tasks.synthetic import demonstrations, lookup, trails
from arpo_megatron.tasks.synthetic.demonstrations import Agent
from arpo_megatron.tasks.synthetic.lookup import GeneratedTasks


@dataclass(frozen=True, slots=True)
class Family:
    """A family of tasks that are generated from a seed."""

    generate: Callable[[int, int, int], GeneratedTasks]
    """Seed, number of training tasks, number of held-out tasks -> the tasks and their search corpus."""
    agent: Callable[[float], Agent]
    """Share of demonstrations with mistakes -> the agent that makes those of the cold start."""


FAMILIES: Mapping[str, Family] = {
    "generated": Family(lookup.generate, demonstrations.calculator_agent),
    **{
        name: Family(family.generate, family.agent)
        for name, family in (
            ("trails", trails.TRAILS),
            ("long_trails", trails.LONG_TRAILS),
            ("early_trails", trails.EARLY_TRAILS),
        )
    },
}
