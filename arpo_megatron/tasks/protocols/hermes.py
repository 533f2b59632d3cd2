"""Hermes / Qwen: a JSON object between <tool_call> tags calls a tool, and ends the model's turn of a ChatML chat."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import ChatTokenizer, chat_text
from arpo_megatron.tasks.protocols.base import (
    InvalidCall,
    Malformed,
    Parsed,
    Reading,
    ResultFrame,
    ToolCall,
    read_arguments,
)
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition
from arpo_megatron.tasks.tags.calls import thought_length
from arpo_megatron.tasks.tags.response import parse_last_turn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FRAME = ResultFrame(
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
UNKNOWN = "unknown"
"""Name in the record of a call without a usable tool."""


@dataclass(frozen=True, slots=True)
class HermesProtocol:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, one a turn. A turn ends with its call.

    The result is a user message with <tool_response>, as Qwen's chat template writes it. The tokens that end the turn
    (`<|im_end|>`) belong to the result, so they are not trained.
    """

    tools: tuple[ToolDefinition, ...] = DEFAULT_TOOLS

    @property
    def stops(self) -> tuple[str, ...]:
        return (_CLOSE,)

    async def read_call(self, text: str, stop: str | None) -> Reading:
        """Read the JSON between the tags. One tag without the other is malformed, anything else in them invalid."""
        body = text[: text.find(_CLOSE)] if stop is not None and _CLOSE in text else text
        body = body[thought_length(body, _OPEN) :]
        _, opened, content = body.partition(_OPEN)
        if stop is None:
            return Malformed(f"{_OPEN} without {_CLOSE}") if opened else None
        return self._read(content) if opened else Malformed(f"{_CLOSE} without {_OPEN}")

    def _read(self, content: str) -> ToolCall | InvalidCall:
        try:
            call = read_arguments(content)
        except ValueError as error:
            return _invalid(f"it is not a JSON object ({error})")
        name, arguments = call.get("name"), call.get("arguments", {})
        names = [tool.name for tool in self.tools]
        if name not in names:
            return _invalid(f"its name is none of {', '.join(names)}")
        if not isinstance(arguments, dict):
            return _invalid("its arguments are not a JSON object")
        return ToolCall(str(name), arguments)

    def result_frame(self) -> ResultFrame:
        """Return the end of the turn, a message for the answer, and the start of the next turn."""
        return _FRAME

    def prompt(self, messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
        """Return the conversation with the tools' schemas at the end of the system message, in Qwen's wording."""
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        first: Message = {
            "role": "system",
            "content": f"{system}\n\n{tool_schemas([tool.function() for tool in self.tools])}".lstrip(),
        }
        return chat_text([first, *rest], tokenizer)

    def describe(self) -> str:
        """Return "": `prompt` has the schemas."""
        return ""

    def read_response(self, text: str, last_turn: str, called: frozenset[str]) -> Parsed:
        """Check the answer of the last turn."""
        return parse_last_turn(last_turn, called)


def tool_schemas(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of a system message that describes tools in Qwen's wording; `functions` as in OpenAI's `tools`."""
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _invalid(reason: str) -> InvalidCall:
    form = '{"name": <function-name>, "arguments": <args-json-object>}'
    return InvalidCall(UNKNOWN, f"Error: the call cannot be executed: {reason}. Write {_OPEN}\n{form}\n{_CLOSE}.")
