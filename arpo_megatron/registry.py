"""The components of methods by name: built-in ones and those of installed packages.

A component is a dataclass with the methods of its extension point's protocol; its fields are its params. Built-in
components are listed in `BUILTIN`. A package adds one by an entry point in the group of the extension point
(docs/guides/extending.md builds one). A component's module is imported when it is loaded.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from arpo_megatron.errors import UserError, did_you_mean
from tools_sandbox.utils.faults import fault_text


class ExtensionPoint(StrEnum):
    """Kinds of components; the value is the group of their entry points."""

    TASK_SELECTOR = "arpo_megatron.task_selectors"
    BRANCH_POLICY = "arpo_megatron.branch_policies"
    REWARD = "arpo_megatron.rewards"
    REWARD_TERM = "arpo_megatron.reward_terms"
    ADVANTAGE = "arpo_megatron.advantages"
    LOSS = "arpo_megatron.losses"
    REPLAY = "arpo_megatron.replay_buffers"
    CALL_PROTOCOL = "arpo_megatron.call_protocols"
    DATA_READER = "arpo_megatron.data_readers"
    ENVIRONMENT = "arpo_megatron.environments"
    PRESET = "arpo_megatron.presets"

    @property
    def label(self) -> str:
        """The name in messages, such as "branch policy"."""
        return self.name.lower().replace("_", " ")


BUILTIN: Mapping[ExtensionPoint, Mapping[str, str]] = {
    ExtensionPoint.TASK_SELECTOR: {
        "epochs": "arpo_megatron.tasks.selectors.base:EpochSelector",
        "failures": "arpo_megatron.tasks.selectors.failures:ReplayedFailures",
        "hinted": "arpo_megatron.tasks.selectors.hinted:HintedTasks",
        "prompts": "arpo_megatron.tasks.selectors.prompts:PromptPopulation",
        "solvable": "arpo_megatron.tasks.selectors.solvable:SolvableTasks",
        "targeted": "arpo_megatron.tasks.selectors.targeted:TargetedTasks",
        "unsaturated": "arpo_megatron.tasks.selectors.unsaturated:UnsaturatedTasks",
    },
    ExtensionPoint.BRANCH_POLICY: {
        "aepo": "arpo_megatron.algorithms.branching.aepo:AepoPolicy",
        "aepo_released": "arpo_megatron.algorithms.branching.aepo_released:AepoReleasedPolicy",
        "aepo_scripts": "arpo_megatron.algorithms.branching.aepo_released:AepoScriptsPolicy",
        "arpo": "arpo_megatron.algorithms.branching.arpo:ArpoPolicy",
        "arpo_released": "arpo_megatron.algorithms.branching.arpo_released:ArpoReleasedPolicy",
        "grpo": "arpo_megatron.algorithms.branching.grpo:GrpoPolicy",
        "random": "arpo_megatron.algorithms.branching.random_forks:RandomPolicy",
    },
    ExtensionPoint.REWARD: {
        "arpo": "arpo_megatron.rewards.arpo:ArpoReward",
        "arpo_released": "arpo_megatron.rewards.released:ReleasedReward",
        "environment": "arpo_megatron.rewards.environment:EnvironmentReward",
    },
    ExtensionPoint.ADVANTAGE: {
        "centred": "arpo_megatron.algorithms.advantages.centred:Centred",
        "chunks": "arpo_megatron.algorithms.advantages.chunks:ChunkReturn",
        "entropy_aware": "arpo_megatron.algorithms.advantages.aepo:EntropyAware",
        "flow": "arpo_megatron.algorithms.advantages.flow:TurnMean",
        "group": "arpo_megatron.algorithms.advantages.group:GroupNormalised",
        "hgpo": "arpo_megatron.algorithms.advantages.hgpo:HierarchyOfGroups",
        "information": "arpo_megatron.algorithms.advantages.information:InformationGain",
        "pivotal": "arpo_megatron.algorithms.advantages.pivotal:PivotalCredit",
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
        "entropy_target": "arpo_megatron.algorithms.losses.entropy_target:EntropyTarget",
        "epo": "arpo_megatron.algorithms.losses.epo:Epo",
        "gspo": "arpo_megatron.algorithms.losses.gspo:Gspo",
        "hapo": "arpo_megatron.algorithms.losses.hapo:Hapo",
        "hispo": "arpo_megatron.algorithms.losses.hispo:Hispo",
        "ipa": "arpo_megatron.algorithms.losses.ipa:Ipa",
        "mdpo": "arpo_megatron.algorithms.losses.mdpo:Mdpo",
        "minirl": "arpo_megatron.algorithms.losses.minirl:MiniRl",
        "mix_ppg": "arpo_megatron.algorithms.losses.mix_ppg:MixPpg",
        "opmd": "arpo_megatron.algorithms.losses.opmd:Opmd",
        "ppo": "arpo_megatron.algorithms.losses.ppo:Ppo",
        "seeupo": "arpo_megatron.algorithms.losses.seeupo:SeeUpo",
    },
    ExtensionPoint.REPLAY: {
        "rollout_replay": "arpo_megatron.algorithms.replay.rollout_replay:RolloutReplay",
        "self_imitation": "arpo_megatron.algorithms.replay.self_imitation:SelfImitation",
        "success_replay": "arpo_megatron.algorithms.replay.success_replay:SuccessReplay",
    },
    ExtensionPoint.CALL_PROTOCOL: {
        "hermes": "arpo_megatron.tasks.protocols.hermes:HermesProtocol",
        "tags": "arpo_megatron.tasks.tags.protocol:TagProtocol",
        "template": "arpo_megatron.engine.template_protocol:TemplateProtocol",
    },
    ExtensionPoint.DATA_READER: {"auto": "arpo_megatron.tasks.files.sources:FileReader"},
    ExtensionPoint.ENVIRONMENT: {
        "scripted_user": "arpo_megatron.tasks.environments.scripted_user:ScriptedUser",
        "sql": "arpo_megatron.tasks.environments.sql:SqlDatabase",
        "verifiers": "arpo_megatron.tasks.environments.verifiers.environment:VerifiersEnvironment",
    },
    ExtensionPoint.PRESET: {
        name: f"arpo_megatron.algorithms.presets:{name.upper()}"
        for name in (
            *("aepo", "aepo_released", "arbitrary_entropy_partial", "arpo", "arpo_released", "bapo", "cispo"),
            *("dapo", "dots", "eapo_partial", "epo", "flow_grpo", "grpo", "grpo_tcr", "ghpo", "gspo", "gui_arpo"),
            *(
                "hapo_partial",
                "hgpo",
                "hispo",
                "infopo",
                "inspo_partial",
                "ipa_partial",
                "loop",
                "mdpo",
                "minirl",
                "r3l_partial",
            ),
            *("random", "rapo_partial", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remix_partial"),
            *("rloo", "seeupo", "spear_partial", "xrpo_partial"),
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
        "verified": "arpo_megatron.rewards.terms.verified:VerifiedAnswer",
    },
}
"""Name -> "module:attribute" of each built-in component."""

IN_FILES = frozenset(
    {ExtensionPoint.REWARD, ExtensionPoint.CALL_PROTOCOL, ExtensionPoint.DATA_READER, ExtensionPoint.ENVIRONMENT}
)
"""Extension points whose key also takes FILE.py:NAME; a config stores its absolute path."""


def names(point: ExtensionPoint) -> list[str]:
    """Return the names of all components of an extension point, sorted."""
    return sorted({*BUILTIN.get(point, {}), *(entry.name for entry in _installed(point))})


def load(point: ExtensionPoint, name: str) -> Any:
    """Return the class (or preset) of that name, or `ATTRIBUTE` of a file for a name like `my.py:ATTRIBUTE`.

    Raises:
        UserError: no package has it, two packages do, or its module cannot be imported.
    """
    if (place := in_file(name)) is not None:
        return attribute_of(*place)
    offered = [entry for entry in _installed(point) if entry.name == name]
    if (own := BUILTIN.get(point, {}).get(name)) is not None:
        offered.append(metadata.EntryPoint(name, own, point.value))
    if not offered:
        if name.endswith(".py"):
            raise UserError(f"{point.label} {name!r}: also name what the file defines, like {name}:NAME")
        known = names(point)
        choices = ", ".join([*known, *(["FILE.py:NAME"] if point in IN_FILES else [])])
        raise UserError(f"unknown {point.label} {name!r}{did_you_mean(name, known)}; known: {choices}")
    if len(found := sorted({entry.value for entry in offered})) > 1:
        raise UserError(f"the {point.label} {name!r} is offered twice, as {' and '.join(found)}: uninstall one")
    try:
        return offered[0].load()
    except Exception as error:  # the package is the user's: anything can go wrong in it
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(
            f"the {point.label} {name!r} cannot be imported from {offered[0].value}: {kind}{error}"
        ) from error


def in_file(name: str) -> tuple[Path, str] | None:
    """Return file and attribute of a name like `./my.py:score`; None for the name of an installed component."""
    path, colon, attribute = name.rpartition(":")
    return (Path(path), attribute) if colon and path.endswith(".py") else None


def attribute_of(path: Path, attribute: str) -> Any:
    """Import a Python file and return one of its attributes.

    Raises:
        UserError: the file is missing, cannot be imported, or has no such attribute.
    """
    module = import_file(path)
    if not hasattr(module, attribute):
        defined = [name for name in vars(module) if not name.startswith("_")]
        raise UserError(f"{path} has no {attribute!r}{did_you_mean(attribute, defined)}")
    return getattr(module, attribute)


@cache
def import_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once. Raises UserError with the line that fails."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's: anything can go wrong in it
        del sys.modules[spec.name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else 0)
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {reason}") from error
    return module


def _installed(point: ExtensionPoint) -> Sequence[metadata.EntryPoint]:
    return _entry_points(tuple(sys.path))[point]


@cache
def _entry_points(_path: tuple[str, ...]) -> Mapping[ExtensionPoint, Sequence[metadata.EntryPoint]]:
    # Cached, because a search takes 17 ms and one config loads a dozen components.
    found = metadata.entry_points()
    return {point: tuple(found.select(group=point.value)) for point in ExtensionPoint}


def params_of(component: type) -> list[str]:
    """Return the names of the fields that a component is constructed with; a function has none."""
    fields = dataclasses.fields(component) if dataclasses.is_dataclass(component) else ()
    return [field.name for field in fields if field.init]


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.init and field.default is field.default_factory is dataclasses.MISSING


def make(point: ExtensionPoint, name: str, given: Mapping[str, Any]) -> Any:
    """Construct the component of that name: each field from `given`, or its default. A reward may be a function.

    `given` may have values of other components.

    Raises:
        UserError: see `load`; or the component refuses a value.
    """
    component = load(point, name)
    if not (isinstance(component, type) and dataclasses.is_dataclass(component)):
        if point is ExtensionPoint.REWARD and inspect.isfunction(component):
            return component
        raise UserError(f"the {point.label} {name!r} is not a dataclass; docs/guides/extending.md shows one")
    values = {field: given[field] for field in params_of(component) if field in given}
    if unset := [
        field.name for field in dataclasses.fields(component) if _is_required(field) and field.name not in values
    ]:
        raise UserError(f"the {point.label} {name!r} needs the params {', '.join(unset)}, which have no default")
    types = get_type_hints(component, include_extras=True)
    try:
        for field, value in values.items():
            where = f"{point.label} {name}: {field}"
            if isinstance(value, int | float | str):
                values[field] = TypeAdapter(types[field]).validate_python(value)
        where = f"{point.label} {name}"
        return component(**values)
    except ValueError as error:  # pydantic's ValidationError is one
        reason = fault_text(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{where}: {reason}") from None


def check_params(components: Sequence[tuple[ExtensionPoint, str]], params: Mapping[str, Any]) -> None:
    """Raise UserError for a param that none of the chosen components has."""
    fields = sorted({field for point, name in components for field in params_of(load(point, name))})
    for param in params:
        if param not in fields:
            chosen = ", ".join(f"{point.label} {name}" for point, name in components)
            raise UserError(
                f"no chosen component has the param {param!r}{did_you_mean(param, fields)}; chosen: {chosen}"
            )
