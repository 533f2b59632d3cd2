"""Which studies there are: their arms, and the one that the others are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECIPE = "trails"
"""The recipe of all studies; an arm is a variant of it (`recipes/trails.py`)."""
BASE_ARM = "arpo"
"""The recipe without a variant."""


@dataclass(frozen=True, slots=True)
class Design:
    """A study.

    Attributes:
        name: of the command.
        about: one sentence for the head of its report.
        arms: in the order of the table.
        control: the arm that the others are compared with.
        seeds: by default.
        pairs: further comparisons, each an arm and the one that it is compared with.
    """

    name: str
    about: str
    arms: Sequence[str]
    control: str
    seeds: int
    pairs: Sequence[tuple[str, str]] = ()


DESIGNS: Mapping[str, Design] = {
    design.name: design
    for design in (
        Design(
            "efficiency",
            "Held-out reward against executed tool calls, for ways of spending a group's trajectories.",
            arms=("grpo", "grpo_equal_calls", "random", "arpo_reference", "arpo", "aepo"),
            control="grpo",
            seeds=5,
            pairs=(("arpo", "random"),),  # what the entropy adds to branching
        ),
        Design(
            "ablation",
            "What the entropy weight (beta), the share of forks (N of M) and the beam (Z) do to ARPO.",
            arms=("arpo", "weight_0", "weight_02", "weight_5", "initial_2", "initial_6", "beam_4"),
            control="arpo",
            seeds=3,
        ),
    )
}


def recipe_of(arm: str) -> str:
    """The words of `arpo train` for an arm."""
    return RECIPE if arm == BASE_ARM else f"{RECIPE}+{arm}"
