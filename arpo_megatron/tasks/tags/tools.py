"""The tools of a job as the tag protocol sees them: a tag for each, and how its text becomes arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arpo_megatron.errors import UserError

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class TagTool:
    """A tool that the policy calls with <name>...</name>."""

    name: str
    text_argument: str | None = None
    """Argument that receives the text of the tag. None: the text is a JSON object with the arguments."""

    @property
    def stop(self) -> str:
        """The closing tag, which ends a generation."""
        return f"</{self.name}>"


DEFAULT_TOOLS = (TagTool("search", "query"), TagTool(PYTHON, "code"))
"""Tools of a job that names none (`rollout.tools`)."""
DEFAULT_NAMES = tuple(tool.name for tool in DEFAULT_TOOLS)


def select_tools(names: Sequence[str], offered: Mapping[str, Mapping[str, Any]]) -> tuple[TagTool, ...]:
    """Return the named tools.

    Args:
        names: `rollout.tools`.
        offered: JSON schema of the arguments of each tool of the service, by name.

    Raises:
        UserError: the service does not offer a tool.
    """
    for name in names:
        if name not in offered:
            raise UserError(
                f"rollout.tools: the tool service does not offer {name!r}; it offers {', '.join(sorted(offered))}"
            )
    return tuple(TagTool(name, _text_argument(offered[name])) for name in names)


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
