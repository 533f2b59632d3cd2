"""`arpo show`: every value of a resolved config, and which layer said so."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from arpo_megatron import resolve
from arpo_megatron.config import JobConfig


def sources(layers: Sequence[resolve.Layer]) -> dict[str, resolve.Layer]:
    """For each dotted key the layer that its value is from: the last that changed it, or in which the user wrote it."""
    values: dict[str, Any] = {}
    found: dict[str, resolve.Layer] = {}
    for layer in layers:
        for key, value in layer.keys.items():
            if layer.source in resolve.THE_USERS or key not in values or values[key] != value:
                found[key] = layer
            values[key] = value
    return found


def render(recipe: str, *, file: Path | None = None, words: Sequence[str] = ()) -> str:
    """The config as YAML, with a comment behind each value that is not a default.

    Raises:
        UserError: as `resolve.resolve`.
    """
    job = resolve.resolve(recipe, file=file, words=words)
    said = sources(resolve.layers(recipe, file=file, words=words))
    lines = [f"# {recipe}: what is not marked is a default", *_lines(resolve.dump(job), JobConfig, "", said)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], owner: Any, prefix: str, said: Mapping[str, resolve.Layer]) -> Iterator[str]:
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
        below = next((layer for name, layer in said.items() if name.startswith(f"{prefix}{key}.")), None)
        layer = said.get(f"{prefix}{key}") or below or said.get(prefix.removesuffix("."))
        default = layer is None or layer.source is resolve.Source.DEFAULT
        yield text if default else f"{text:<48}  # {layer}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
