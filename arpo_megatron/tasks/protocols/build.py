"""Construction of the protocol that a job names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo_megatron.config import RolloutConfig
from arpo_megatron.registry import ExtensionPoint, make
from arpo_megatron.tasks.environments.protocol import EnvironmentProtocol
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition, tool_names


def make_protocol(
    name: str,
    tools: tuple[ToolDefinition, ...] = DEFAULT_TOOLS,
    *,
    parser: str | None = None,
    model: Path | None = None,
    parse: Any = None,
) -> CallProtocol:
    """Return the protocol of that name (`rollout.protocol`).

    Args:
        name: its name in the registry.
        tools: the tools that the policy may call.
        parser: `rollout.tool_call_parser`.
        model: Hugging Face directory; needed to insert results with the template protocol.
        parse: `engine.function_calls.CallParser`; needed to read calls with the template protocol.

    Raises:
        UserError: no package has the protocol.
    """
    given: Mapping[str, Any] = {"tools": tools, "parser": parser, "model": model, "parse": parse}
    protocol: CallProtocol = make(
        ExtensionPoint.CALL_PROTOCOL, name, {key: value for key, value in given.items() if value is not None}
    )
    return protocol


def reading_protocol(rollout: RolloutConfig) -> CallProtocol:
    """Return the protocol of a job for reading finished responses: it knows the names of the tools only."""
    if rollout.environment is not None:
        return EnvironmentProtocol()
    tools = tuple(ToolDefinition(name) for name in tool_names(rollout.tools))
    return make_protocol(rollout.protocol, tools)
