"""The tools of a job as a protocol describes them to the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.errors import UserError

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool that the policy may call."""

    name: str
    text_argument: str | None = None
    """The only required argument, if it is a text; None: there is no such argument."""
    description: str = ""
    """One sentence for the model."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON schema of the arguments."""
    cacheable: bool = False
    """The tool service gives equal calls the same answer."""

    @property
    def stop(self) -> str:
        """The closing tag of the tag protocol, which ends a generation."""
        return f"</{self.name}>"

    def function(self) -> dict[str, Any]:
        """Return the definition in the form of OpenAI's `tools`, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.arguments)}
        return {"type": "function", "function": function}


def _only_text(name: str, argument: str, description: str, *, cacheable: bool) -> ToolDefinition:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return ToolDefinition(name, argument, description, schema, cacheable)


DEFAULT_TOOLS = (
    _only_text("search", "query", "Search for passages that answer a query.", cacheable=True),
    _only_text(PYTHON, "code", "Run a Python program and return what it prints.", cacheable=False),
)
"""Tools of a job that names none (`rollout.tools`)."""
DEFAULT_NAMES = tuple(tool.name for tool in DEFAULT_TOOLS)


def select_tools(names: Sequence[str], offered: Mapping[str, Mapping[str, Any]]) -> tuple[ToolDefinition, ...]:
    """Return the named tools.

    Args:
        names: `rollout.tools`.
        offered: the tools of the service by name, each with its `arguments` (JSON schema) and `description`.

    Raises:
        UserError: the service does not offer a tool.
    """
    for name in names:
        if name not in offered:
            raise UserError(
                f"rollout.tools: the tool service does not offer {name!r}; it offers {', '.join(sorted(offered))}"
            )
    return tuple(
        ToolDefinition(
            name,
            _text_argument(offered[name]["arguments"]),
            str(offered[name].get("description", "")),
            offered[name]["arguments"],
            bool(offered[name].get("cacheable", False)),
        )
        for name in names
    )


def tool_names(named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of a job's tools, given `rollout.tools`."""
    return DEFAULT_NAMES if named is None else tuple(named)


def _text_argument(schema: Mapping[str, Any]) -> str | None:
    """Return the only required argument if it is a string."""
    required = schema.get("required", ())
    if len(required) != 1:
        return None
    kind = schema.get("properties", {}).get(required[0], {})
    return str(required[0]) if isinstance(kind, Mapping) and kind.get("type") == "string" else None
