"""Designs of the studies: their arms, and the arm that the others are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECIPE = "trails"
"""The recipe of all studies; an arm is a variant of it (`recipes/trails.py`)."""
BASE_ARM = "arpo"
"""The arm that is the recipe without a variant."""


@dataclass(frozen=True, slots=True)
class Design:
    """A study: its arms and comparisons."""

    name: str
    """Name of the command."""
    about: str
    """First sentence of the report."""
    arms: Sequence[str]
    """Arms in the order of the table."""
    control: str
    """Arm that the others are compared with."""
    seeds: int
    """Default number of seeds."""
    pairs: Sequence[tuple[str, str]] = ()
    """Further comparisons: an arm and its control."""


DESIGNS: Mapping[str, Design] = {
    design.name: design
    for design in (
        Design(
            "efficiency",
            "Held-out reward against executed tool calls, for ways of spending a group's trajectories.",
            arms=("grpo", "grpo_equal_calls", "random", "arpo_released", "arpo", "aepo"),
            control="grpo",
            seeds=5,
            pairs=(("arpo", "random"),),  # the effect of entropy on branching
        ),
        Design(
            "ablation",
            "Effect of the entropy weight (beta), the share of forks (N of M) and the beam (Z) on ARPO.",
            arms=("arpo", "weight_0", "weight_02", "weight_5", "initial_2", "initial_6", "beam_4"),
            control="arpo",
            seeds=3,
        ),
    )
}


def arm_recipe(arm: str) -> str:
    """Return the recipe argument of `arpo train` for an arm."""
    return RECIPE if arm == BASE_ARM else f"{RECIPE}+{arm}"
