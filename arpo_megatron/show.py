"""`arpo show`: every value of a resolved config, and which layer said so."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from arpo_megatron import resolve
from arpo_megatron.config import JobConfig


def sources(layers: Sequence[resolve.Layer]) -> dict[str, str]:
    """For each dotted key the source of its value: the last layer that changed it, or that a user wrote it in."""
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    for layer in layers:
        whole = layer.source.startswith(("default", "base", "recipe"))  # these name every key
        for key, value in _leaves(layer.values):
            if not whole or key not in values or values[key] != value:
                found[key] = layer.source
            values[key] = value
    return found


def render(recipe: str, *, file: Path | None = None, words: Sequence[str] = ()) -> str:
    """The config as YAML, with a comment behind each value that is not a default.

    Raises:
        UserError: as `resolve.resolve`.
    """
    job = resolve.resolve(recipe, file=file, words=words)
    said = sources(resolve.layers(recipe, file=file, words=words))
    lines = [f"{recipe}: what is not marked is a default"]
    lines += _lines(resolve.dump(job), JobConfig, "", said)
    return "\n".join(["# " + lines[0], *lines[1:]]) + "\n"


def _lines(values: Mapping[str, Any], owner: Any, prefix: str, said: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    sections = {field.name for field in dataclasses.fields(owner) if dataclasses.is_dataclass(field.type)}
    types = {field.name: field.type for field in dataclasses.fields(owner)}
    for key, value in values.items():
        if key in sections:
            yield f"{indent}{key}:"
            yield from _lines(value, types[key], f"{prefix}{key}.", said)
            continue
        text = f"{indent}{key}: {_yaml(value)}"
        # A whole section may have been given at once, by a word such as data={kind: generated}.
        source = said.get(f"{prefix}{key}") or said.get(prefix.removesuffix("."), "default")
        yield text if source == "default" else f"{text:<48}  # {source}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
