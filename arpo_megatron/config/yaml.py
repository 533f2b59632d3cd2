"""YAML 1.2, read strictly: `off`, `yes` and 4:00:00 are text, 1e-5 is a number, and a repeated key is an error."""

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from arpo_megatron.errors import UserError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file; an empty file is an empty mapping. Raises UserError."""
    try:
        values = _yaml().load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {path}: {error}") from None
    except (YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise UserError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must hold a mapping of config keys to values")
    return values


def parse_value(text: str) -> Any:
    """Return the value of an override as YAML reads it; text that is not YAML stands for itself."""
    try:
        return _yaml().load(text) if text else ""
    except (YAMLError, ValueError):
        return text


def yaml_text(values: Any) -> str:
    """Return plain values as a YAML document with the keys in their order."""
    stream = io.StringIO()
    _yaml().dump(values, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # annotated as None
    return yaml


def _one_line(error: Exception) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    problem = (error.problem or error.context or "syntax error").partition(" with value")[0]
    return f"{problem} (line {error.problem_mark.line + 1})"
