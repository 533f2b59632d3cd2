"""YAML files of configs, and values of overrides."""

from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from tools_sandbox.utils.yaml import NotYamlError, load_yaml


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file; an empty file is an empty mapping. Raises UserError."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except NotYamlError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config file {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} must hold a mapping of config keys to values")
    return values


def parse_value(text: str) -> Any:
    """Return the value of an override as YAML reads it; text that is not YAML stands for itself."""
    try:
        return load_yaml(text) if text else ""
    except NotYamlError:
        return text
