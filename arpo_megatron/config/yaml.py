"""YAML 1.2, read strictly: `off`, `yes` and 4:00:00 are text, 1e-5 is a number, and a repeated key is an error."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from arpo_megatron.errors import UserError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012  (how PyYAML declares them)
        first: [
            (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int", ":float", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][\d_]*|0x[\da-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[dict[Any, Any]]:
    lines: dict[str, int] = {}
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        line = key.start_mark.line + 1
        if key.value in lines:
            where = f"in line {lines[key.value]} and in line {line}" if line != lines[key.value] else "twice"
            raise yaml.YAMLError(f"the key {key.value} stands {where}")
        lines[key.value] = line
    values: dict[Any, Any] = {}
    yield values  # first the mapping, then what is in it: so the loader resolves anchors
    values.update(loader.construct_mapping(node))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file; an empty file is an empty mapping. Raises UserError."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506  (a SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must hold a mapping of config keys to values")
    return values


def parse_value(text: str) -> Any:
    """Return the value of an override as YAML reads it; text that is not YAML stands for itself."""
    try:
        return yaml.load(text, _Loader) if text else ""  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError:
        return text


def yaml_text(values: Any) -> str:
    """Return plain values as a YAML document with the keys in their order."""
    return yaml.safe_dump(values, sort_keys=False)
