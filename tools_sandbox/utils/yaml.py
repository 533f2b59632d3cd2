"""YAML 1.2, read strictly: `off`, `yes` and 4:00:00 are text, 1e-5 is a number, and a repeated key is an error."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError


class NotYamlError(ValueError):
    """The text is not YAML; the message is one line."""


def load_yaml(text: str) -> Any:
    """Return the value of a YAML document, None for an empty one. Raises NotYamlError."""
    try:
        return _yaml().load(text)
    except (YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise NotYamlError(_one_line(error)) from None


def yaml_text(value: Any, *, flow: bool = False) -> str:
    """Return a plain value as a YAML document with the keys in their order; with `flow`, as one line."""
    yaml, stream = _yaml(), io.StringIO()
    if flow:
        yaml.default_flow_style, yaml.width = True, 1_000_000
    yaml.dump(value, stream)
    return stream.getvalue().removesuffix("\n...\n").strip() if flow else stream.getvalue()


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
