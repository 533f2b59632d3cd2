"""A config as plain values and as a YAML file. Reading one back checks it: `arpo_megatron.jobs.resolve.load`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from arpo_megatron.config.job import JobConfig
from arpo_megatron.utils.atomic import atomic_write
from tools_sandbox.utils.yaml import yaml_text

JOB = TypeAdapter(JobConfig)


def dump_config(config: JobConfig) -> dict[str, Any]:
    """Return the config as nested values that JSON and YAML can hold."""
    plain: dict[str, Any] = JOB.dump_python(config, mode="json")
    return plain


def save_config(config: JobConfig, path: Path) -> None:
    """Write the config as YAML; at any moment the file is the old or the new one, and whole."""
    with atomic_write(path) as partial:
        partial.write_text(yaml_text(dump_config(config)), encoding="utf-8")


def config_keys(owner: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a config class, sections included."""
    for item in dataclasses.fields(owner):
        yield prefix + item.name
        if dataclasses.is_dataclass(item.type):
            yield from config_keys(item.type, f"{prefix}{item.name}.")
