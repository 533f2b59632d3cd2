"""`arpo show`: every value of a resolved config, and the layer that it comes from."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arpo_megatron.config.io import dump_config
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.tool_file import read_tool_file
from tools_sandbox.utils.yaml import yaml_text


def sources(layers: Sequence[resolve.Layer]) -> dict[str, resolve.Layer]:
    """Return for each dotted key the last layer that changed its value, or in which the user wrote it."""
    values: dict[str, Any] = {}
    found: dict[str, resolve.Layer] = {}
    for layer in layers:
        if layer.source is resolve.Source.PRESET:  # it removes the params of other components
            for key in [key for key in found if key.startswith("algorithm.params.")]:
                del found[key], values[key]
        for key, value in layer.keys.items():
            if layer.source in resolve.USER_LAYERS or key not in values or values[key] != value:
                found[key] = layer
            values[key] = value
    return found


def render(recipe: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> str:
    """Return the config as YAML, with the source of each value that is not a default as a comment.

    Raises:
        UserError: the recipe, the file or an override is invalid, or `sandbox.file` cannot be used.
    """
    job = resolve.resolve(recipe, file=file, overrides=overrides)
    if job.sandbox.file is not None:
        read_tool_file(job.sandbox.file, job.sandbox)
    origins = sources(resolve.layers(recipe, file=file, overrides=overrides))
    lines = [f"# {recipe}: values without a comment are defaults", *_lines(dump_config(job), "", origins)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], prefix: str, origins: Mapping[str, resolve.Layer]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        if isinstance(value, Mapping) and value:  # a section, or params by name
            yield f"{indent}{key}:"
            yield from _lines(value, f"{prefix}{key}.", origins)
            continue
        text = f"{indent}{key}: {yaml_text(value, flow=True)}"
        layer = origins.get(f"{prefix}{key}")
        default = layer is None or layer.source is resolve.Source.DEFAULT
        yield text if default else f"{text:<48}  # {layer}"
