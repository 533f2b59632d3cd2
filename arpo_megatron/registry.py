"""The parts that a method is put together from, by name: the project's own, and those of installed packages.

A part is a frozen dataclass whose fields are its numbers and whose methods are those of the protocol of its plug-in
point. A package adds one by an entry point in the group of that point (docs/extending.md builds one); the project's own
stand in `BUILTIN`. Nothing is imported before it is asked for.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from importlib import metadata
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from arpo_megatron.errors import UserError, did_you_mean


class ExtensionPoint(StrEnum):
    """The plug-in points, by the group of their entry points."""

    TASK_SELECTOR = "arpo_megatron.task_selectors"
    BRANCH_POLICY = "arpo_megatron.branch_policies"
    REWARD = "arpo_megatron.rewards"
    REWARD_TERM = "arpo_megatron.reward_terms"
    ADVANTAGE = "arpo_megatron.advantages"
    LOSS = "arpo_megatron.losses"
    REPLAY = "arpo_megatron.replay_buffers"
    PRESET = "arpo_megatron.presets"

    @property
    def words(self) -> str:
        """In words, for messages: "advantage", "branch policy"."""
        return self.name.lower().replace("_", " ")


BUILTIN: Mapping[ExtensionPoint, Mapping[str, str]] = {
    ExtensionPoint.TASK_SELECTOR: {
        "epochs": "arpo_megatron.tasks.selectors.base:EpochSelector",
        "solvable": "arpo_megatron.tasks.selectors.solvable:SolvableTasks",
        "targeted": "arpo_megatron.tasks.selectors.targeted:TargetedTasks",
        "unsaturated": "arpo_megatron.tasks.selectors.unsaturated:UnsaturatedTasks",
    },
    ExtensionPoint.BRANCH_POLICY: {
        "aepo": "arpo_megatron.algorithms.branching.aepo:AepoPolicy",
        "aepo_reference": "arpo_megatron.algorithms.branching.aepo_reference:AepoReferencePolicy",
        "arpo": "arpo_megatron.algorithms.branching.arpo:ArpoPolicy",
        "arpo_reference": "arpo_megatron.algorithms.branching.arpo_reference:ArpoReferencePolicy",
        "grpo": "arpo_megatron.algorithms.branching.grpo:GrpoPolicy",
        "random": "arpo_megatron.algorithms.branching.random_forks:RandomPolicy",
    },
    ExtensionPoint.REWARD: {
        "arpo": "arpo_megatron.rewards.arpo:ArpoReward",
        "arpo_released": "arpo_megatron.rewards.released:ReleasedReward",
    },
    ExtensionPoint.ADVANTAGE: {
        "centred": "arpo_megatron.algorithms.advantages.centred:Centred",
        "chunks": "arpo_megatron.algorithms.advantages.chunks:ChunkReturn",
        "entropy_aware": "arpo_megatron.algorithms.advantages.aepo:EntropyAware",
        "flow": "arpo_megatron.algorithms.advantages.flow:TurnMean",
        "group": "arpo_megatron.algorithms.advantages.group:GroupNormalised",
        "hgpo": "arpo_megatron.algorithms.advantages.hgpo:HierarchyOfGroups",
        "rapo": "arpo_megatron.algorithms.advantages.rapo:RewardAware",
        "reinforce_plus_plus": "arpo_megatron.algorithms.advantages.reinforce_plus_plus:ReinforcePlusPlus",
        "rloo": "arpo_megatron.algorithms.advantages.rloo:LeaveOneOut",
        "token_group": "arpo_megatron.algorithms.advantages.token_group:TokenGroup",
        "xrpo": "arpo_megatron.algorithms.advantages.xrpo:NoveltySharpened",
    },
    ExtensionPoint.LOSS: {
        "aepo": "arpo_megatron.algorithms.losses.aepo:Aepo",
        "bapo": "arpo_megatron.algorithms.losses.bapo:Bapo",
        "cispo": "arpo_megatron.algorithms.losses.cispo:Cispo",
        "clip_cov": "arpo_megatron.algorithms.losses.clip_cov:ClipCov",
        "epo": "arpo_megatron.algorithms.losses.epo:Epo",
        "gspo": "arpo_megatron.algorithms.losses.gspo:Gspo",
        "hapo": "arpo_megatron.algorithms.losses.hapo:Hapo",
        "hispo": "arpo_megatron.algorithms.losses.hispo:Hispo",
        "ipa": "arpo_megatron.algorithms.losses.ipa:Ipa",
        "mdpo": "arpo_megatron.algorithms.losses.mdpo:Mdpo",
        "minirl": "arpo_megatron.algorithms.losses.minirl:MiniRl",
        "mix_ppg": "arpo_megatron.algorithms.losses.mix_ppg:MixPpg",
        "ppo": "arpo_megatron.algorithms.losses.ppo:Ppo",
    },
    ExtensionPoint.REPLAY: {
        "rollout_replay": "arpo_megatron.algorithms.replay.rollout_replay:RolloutReplay",
        "self_imitation": "arpo_megatron.algorithms.replay.self_imitation:SelfImitation",
        "success_replay": "arpo_megatron.algorithms.replay.success_replay:SuccessReplay",
    },
    ExtensionPoint.PRESET: {
        name: f"arpo_megatron.algorithms.presets:{name.upper()}"
        for name in (
            "aepo",
            "aepo_reference",
            "arpo",
            "arpo_reference",
            "bapo",
            "cispo",
            "dapo",
            "dots",
            "eapo",
            "epo",
            "flow_grpo",
            "grpo",
            "grpo_tcr",
            "gspo",
            "gui_arpo",
            "hapo",
            "hgpo",
            "hispo",
            "ipa",
            "loop",
            "mdpo",
            "minirl",
            "random",
            "rapo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remix",
            "rloo",
            "spear",
            "xrpo",
        )
    },
    ExtensionPoint.REWARD_TERM: {
        "eapo": "arpo_megatron.rewards.terms.eapo:GeometricDiscount",
        "fapo": "arpo_megatron.rewards.terms.fapo:FlawedPositive",
        "format": "arpo_megatron.rewards.terms.measures:BrokenFormat",
        "length": "arpo_megatron.rewards.terms.measures:Length",
        "overlong": "arpo_megatron.rewards.terms.measures:Overlong",
        "spear": "arpo_megatron.rewards.terms.spear:FadingToolBonus",
        "spo": "arpo_megatron.rewards.terms.spo:ShareOfWins",
        "tool_calls": "arpo_megatron.rewards.terms.measures:ToolCalls",
    },
}
"""The project's own parts: name -> "module:attribute"."""


def names(point: ExtensionPoint) -> list[str]:
    """Every name that a point knows, sorted."""
    return sorted({*BUILTIN.get(point, {}), *(entry.name for entry in _installed(point))})


def load(point: ExtensionPoint, name: str) -> Any:
    """The object of that name.

    Raises:
        UserError: nobody offers it, two packages do, or its package cannot be imported.
    """
    offered = [entry for entry in _installed(point) if entry.name == name]
    if (own := BUILTIN.get(point, {}).get(name)) is not None:
        offered.append(metadata.EntryPoint(name, own, point.value))
    if not offered:
        known = names(point)
        raise UserError(f"unknown {point.words} {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    if len(found := sorted({entry.value for entry in offered})) > 1:
        raise UserError(f"the {point.words} {name!r} is offered twice, as {' and '.join(found)}: uninstall one")
    try:
        return offered[0].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"the {point.words} {name!r} cannot be imported from {offered[0].value}: {error}") from None


def _installed(point: ExtensionPoint) -> Sequence[metadata.EntryPoint]:
    return _entry_points(tuple(sys.path))[point]


@cache
def _entry_points(_path: tuple[str, ...]) -> Mapping[ExtensionPoint, Sequence[metadata.EntryPoint]]:
    """Of all packages on the path. Looking through them takes 17 ms, and one config asks for a dozen parts."""
    found = metadata.entry_points()
    return {point: tuple(found.select(group=point.value)) for point in ExtensionPoint}


def params_of(part: type) -> list[str]:
    """Names of the fields that a part is made with."""
    return [field.name for field in dataclasses.fields(part) if field.init]


def make(point: ExtensionPoint, name: str, given: Mapping[str, Any]) -> Any:
    """The part of that name with its numbers: each of its fields from `given`, or its default.

    What else `given` holds is for other parts.

    Raises:
        UserError: see `load`; or a value is not one that the part can have.
    """
    part = load(point, name)
    values = {field: given[field] for field in params_of(part) if field in given}
    types = get_type_hints(part, include_extras=True)
    try:
        for field, value in values.items():
            where = f"{point.words} {name}: {field}"
            if isinstance(value, int | float | str):
                values[field] = TypeAdapter(types[field]).validate_python(value)
        where = f"{point.words} {name}"
        return part(**values)
    except ValueError as error:  # pydantic's is one too
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{where}: {said}") from None


def check_params(parts: Sequence[tuple[ExtensionPoint, str]], numbers: Mapping[str, Any]) -> None:
    """Raises UserError for a number that none of the chosen parts has."""
    fields = sorted({field for point, name in parts for field in params_of(load(point, name))})
    for name in numbers:
        if name not in fields:
            chosen = ", ".join(f"{point.words} {part}" for point, part in parts)
            raise UserError(f"no chosen part has the number {name!r}{did_you_mean(name, fields)} (chosen: {chosen})")
