"""Resolution of a job's config: defaults, recipe, variants, file and overrides in layers, then validation."""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from arpo_megatron import registry
from arpo_megatron.algorithms.components import check_components
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import JOB, config_keys, dump_config
from arpo_megatron.config.yaml import parse_value, read_yaml
from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.jobs.paths import with_absolute_paths
from arpo_megatron.registry import ExtensionPoint
from arpo_megatron.rewards import check_reward
from tools_sandbox.utils.faults import fault_text

Tree = dict[str, Any]


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    from arpo_megatron import recipes

    modules = (module.name for module in pkgutil.iter_modules(recipes.__path__))
    return sorted(name for name in modules if not name.startswith("_"))


def split_recipe(recipe: str) -> list[str]:
    """Split RECIPE+VARIANT+... into recipe and variants; the path of a file may have a `+`."""
    path, suffix, variants = recipe.partition(".py+")
    if suffix or recipe.endswith(".py"):
        return [path + suffix.removesuffix("+"), *(variants.split("+") if variants else [])]
    return recipe.split("+")


def variant_names(recipe: str) -> list[str]:
    """Return the variants of a recipe, which follow its name after a `+`: layouts, number formats, comparison arms."""
    return [name for name in _variants(recipe) if "+" not in name]


def gpu_of(recipe: str) -> str:
    """Return the GPU (`arpo plan --gpu`) that the last layout in `RECIPE+variant+...` is for."""
    name, *wanted = recipe.split("+")
    layouts = _layouts(name)
    chosen = [layouts[variant].gpu for variant in wanted if variant in layouts]
    return chosen[-1] if chosen else "h100-80"


def layout_names(recipe: str) -> list[str]:
    """Return the variants of a recipe that are layouts."""
    return list(_layouts(recipe))


def _layouts(recipe: str) -> Mapping[str, Any]:
    if recipe not in recipe_names():
        return {}
    layouts: Mapping[str, Any] = getattr(importlib.import_module(f"arpo_megatron.recipes.{recipe}"), "LAYOUTS", {})
    return layouts


class Source(StrEnum):
    """Kinds of layers, by where their values come from."""

    DEFAULT = "default"
    BASE = "base"
    RECIPE = "recipe"
    VARIANT = "variant"
    FILE = "file"
    PRESET = "preset"
    OVERRIDE = "override"
    FP8 = "model.fp8"


USER_LAYERS = frozenset({Source.VARIANT, Source.FILE, Source.OVERRIDE})
"""Layers that the user chose. They have only some keys; the other layers have all."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Nested config values from one source. A later layer takes precedence over the ones before."""

    source: Source
    name: str
    """Name of the base, recipe, variant, preset or file; empty for defaults and overrides."""
    values: Tree

    @property
    def keys(self) -> dict[str, Any]:
        """Values by dotted key, `section.key`."""
        return dict(_leaves(self.values))

    def __str__(self) -> str:
        return f"{self.source} {self.name}".strip()


def layers(recipe: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> list[Layer]:
    """Return the unchecked layers: defaults, base, recipe, variants, YAML file, overrides, and the presets they name.

    Args:
        recipe: name of a recipe or path of its .py file, with variants after a `+`.
        file: YAML file with some of the keys.
        overrides: `section.key=value`.

    Raises:
        UserError: the recipe or variant is unknown, or the file or an override cannot be read.
    """
    name, *wanted = split_recipe(recipe)
    module = _recipe_module(name)
    found = [Layer(Source.DEFAULT, "", dump_config(JobConfig(name=Path(name).stem)))]
    if callable(base := getattr(module, "base", None)):
        found.append(Layer(Source.BASE, base.__name__, _values_of(base, name)))
    found.append(Layer(Source.RECIPE, name, _values_of(module.recipe, name)))
    variants, names = _variants(name), variant_names(name)
    for variant in wanted:
        if variant not in names:
            known = f"; variants: {', '.join(names)}" if names else ", which has none"
            raise UserError(f"unknown variant {variant!r} of {name}{did_you_mean(variant, names)}{known}")
    both = [f"{one}+{two}" for one in wanted for two in wanted]
    for variant in [*wanted, *(name for name in both if name in variants)]:
        found += [
            Layer(Source.VARIANT, variant, _nested(key.split("."), value)) for key, value in variants[variant].items()
        ]
    if file is not None:
        found.append(Layer(Source.FILE, str(file), read_yaml(file)))
    return _with_fp8_dtype(_with_presets(found, override_layers(overrides)))


def _with_fp8_dtype(found: list[Layer]) -> list[Layer]:
    """Add a layer that makes a generated model bfloat16 if FP8 is asked for and no number format is given."""
    values = {key: value for layer in found for key, value in layer.keys.items()}
    given = explicit_keys(found)
    generated = values["model.path"] is None and values["model.hub_id"] is None
    if values["model.fp8"] == "none" or not generated or "model.dtype" in given:
        return found
    return [*found, Layer(Source.FP8, "", {"model": {"dtype": "bfloat16"}})]


def explicit_keys(layers: Sequence[Layer]) -> set[str]:
    """Return the dotted keys that the user set in variants, file or overrides."""
    return {key for layer in layers if layer.source in USER_LAYERS for key in layer.keys}


def _with_presets(below: Sequence[Layer], overrides: Sequence[Layer]) -> list[Layer]:
    """Insert each preset named by `algorithm.name` below the layer that names it, or below all overrides.

    Recipes have all keys, so a recipe's preset is applied when its config is built.
    """
    found: list[Layer] = []
    for layer in below:
        named = _preset_name(layer) if layer.source in (Source.VARIANT, Source.FILE) else None
        found += [layer] if named is None else [_preset(named), layer]
    chosen = [name for name in map(_preset_name, overrides) if name is not None]
    return [*found, *map(_preset, chosen[-1:]), *overrides]


def _preset_name(layer: Layer) -> str | None:
    section = layer.values.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


def _preset(name: str) -> Layer:
    values: Tree = {}
    for key, value in registry.load(ExtensionPoint.PRESET, name).values.items():
        _merge(values, _nested(key.split("."), value))
    return Layer(Source.PRESET, name, values)


def resolve(recipe: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> JobConfig:
    """Merge the layers of a job (see `layers`) and validate the result.

    Raises:
        UserError: a recipe, file, key or value is invalid, or the combination cannot work. The message begins with the
            path of the file if the job is valid without it.
    """
    try:
        return _resolve(recipe, file, overrides)
    except UserError as error:
        if file is not None and str(file) not in str(error) and _is_valid(recipe, overrides):
            raise UserError(f"{file}: {error}") from None
        raise


def _is_valid(recipe: str, overrides: Sequence[str]) -> bool:
    try:
        _resolve(recipe, None, overrides)
    except UserError:
        return False
    return True


def _resolve(recipe: str, file: Path | None, overrides: Sequence[str]) -> JobConfig:
    values: Tree = {}
    for layer in layers(recipe, file=file, overrides=overrides):
        _apply(values, layer)
    return with_absolute_paths(check(values))


def with_overrides(config: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """Return a config with `key=value` overrides applied. Raises UserError like `resolve`."""
    values = dump_config(config)
    for layer in _with_presets([], override_layers(overrides)):
        _apply(values, layer)
    return with_absolute_paths(check(values))


def override_layers(overrides: Sequence[str]) -> list[Layer]:
    """Return a layer for each `key=value` override. Raises UserError if one cannot be read."""
    return [Layer(Source.OVERRIDE, "", _parse_override(override)) for override in overrides]


def _variants(recipe: str) -> Mapping[str, Mapping[str, Any]]:
    variants: Mapping[str, Mapping[str, Any]] = getattr(_recipe_module(recipe), "VARIANTS", {})
    if not isinstance(variants, Mapping) or not all(isinstance(each, Mapping) for each in variants.values()):
        raise UserError(f"{recipe}: VARIANTS must map a name to values by key, like {{'long': {{'train.steps': 77}}}}")
    return variants


def _values_of(make: Callable[[], JobConfig], recipe: str) -> dict[str, Any]:
    """Return the config of a recipe as nested values. Raises UserError if its function fails or returns another type.

    Args:
        make: its function `recipe` or `base`.
        recipe: its name or file.
    """
    try:
        job = make()
    except UserError:
        raise
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join([error.title, *map(str, fault["loc"])])
        raise UserError(f"{recipe}: {make.__name__}() failed: {place}: {fault_text(fault)}") from error
    except Exception as error:  # the file is the user's: anything can go wrong in it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{recipe}: {make.__name__}() failed: {reason}") from error
    if not isinstance(job, JobConfig):
        raise UserError(f"{recipe}: {make.__name__}() returned a {type(job).__name__}, not a JobConfig")
    return dump_config(job)


def _recipe_module(name: str) -> ModuleType:
    """Import a recipe of the package, or a user's file. Raises UserError if there is none."""
    if name.endswith(".py"):
        module = registry.import_file(Path(name))
        if not callable(getattr(module, "recipe", None)):
            raise UserError(f"{name} has no function recipe() -> JobConfig")
        return module
    if name not in (names := recipe_names()):
        raise UserError(f"unknown recipe {name!r}{did_you_mean(name, names)}; recipes: {', '.join(names)}, or FILE.py")
    return importlib.import_module(f"arpo_megatron.recipes.{name}")


def check(values: Mapping[str, Any]) -> JobConfig:
    """Validate plain values. Raises UserError with one line for the first error."""
    job = _without_components(values)
    check_components(job)
    check_reward(job.reward, job.rollout.max_response_tokens)
    return job


def _without_components(values: Mapping[str, Any]) -> JobConfig:
    try:
        # From JSON, strict mode still accepts text for a path and a list for a tuple, but not true for 1.
        return JOB.validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def load(path: Path) -> JobConfig:
    """Read and validate a config that `save_config` wrote. Raises UserError with a line that begins with the path."""
    return _from_file(path, check)


def read(path: Path) -> JobConfig:
    """Read a config like `load`, but import none of the components that it names: the run may be another person's."""
    return _from_file(path, _without_components)


def _from_file(path: Path, validate: Callable[[Mapping[str, Any]], JobConfig]) -> JobConfig:
    values = read_yaml(path)
    try:
        return validate(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _parse_override(override: str) -> Tree:
    """`a.b=1` -> {"a": {"b": 1}}; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"cannot read {override!r}: write an override as section.key=value")
    return _nested(key.split("."), parse_value(text))


def _nested(path: Sequence[str], value: Any) -> Tree:
    """["a", "b"] and 1 -> {"a": {"b": 1}}."""
    for part in reversed(path):
        value = {part: value}
    return value  # type: ignore[no-any-return]  # a key has at least one part, so this is a dict


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _apply(values: Tree, layer: Layer) -> None:
    """Merge a layer into the values. A preset has all params of its components, so it removes the others."""
    if layer.source is Source.PRESET and "algorithm" in values:
        values["algorithm"]["params"] = {}
    _merge(values, layer.values)


def _merge(base: Tree, over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _one_line(error: ValidationError) -> str:
    # Unknown keys first: a misspelt key is the most likely cause of the other errors. Of a union, the member that the
    # value fits best: the one with the fault deepest inside. pydantic names members, and keys, in brackets.
    found = [(fault, [str(part) for part in fault["loc"] if "[" not in str(part)]) for fault in error.errors()]
    first = found[0][1][:2]
    rank = [(fault["type"] != "unexpected_keyword_argument", path[:2] != first, -len(path)) for fault, path in found]
    fault, path = found[rank.index(min(rank))]
    key = ".".join(path)
    if fault["type"] == "unexpected_keyword_argument":
        return f"unknown config key {key}{_key_hint(path)}"
    message = fault_text(fault)
    if not path or fault["type"] == "value_error":
        return f"invalid config: {message}"
    return f"config key {key}: {message[0].lower()}{message[1:]}, not {fault['input']!r}"


def _key_hint(path: Sequence[str]) -> str:
    """Suggest a key of the section that contains the name or is like it, else the same key elsewhere, else list all."""
    section, _, name = ".".join(path).rpartition(".")
    every = {key: key.rpartition(".") for key in config_keys(JobConfig)}
    same = [own for owner, _, own in every.values() if owner == section]
    if hint := did_you_mean(name, same, section and f"{section}.", cutoff=0.85):
        return hint
    longer = [own for own in same if name in own.split("_")]
    if hint := did_you_mean(name, longer or same, section and f"{section}.", cutoff=0.0 if longer else 0.7):
        return hint
    if found := [key for key, (*_, own) in every.items() if own == name]:
        return f"; did you mean {found[0]}?"
    return f"; keys{section and f' of {section}'}: {', '.join(same)}"
