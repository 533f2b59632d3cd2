"""Messages with tool calls as text, in the form of Hermes / Qwen, and back."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.protocols.hermes import tool_schemas

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class UnreadableCallError(ValueError):
    """A tool call is not what its schema asks for; the model reads the text."""


def conversation(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the first messages of an episode as texts; the system message ends with the schemas of `tools`."""
    texts: list[Message] = [{"role": str(each["role"]), "content": _content(each)} for each in messages]
    if not tools:
        return texts
    system = [] if not texts or texts[0]["role"] != "system" else [texts.pop(0)["content"]]
    return [{"role": "system", "content": "\n\n".join((*system, tool_schemas(tools)))}, *texts]


def message_of(turn: str) -> dict[str, Any]:
    """Return a turn of the model as a message of the assistant. Raises UnreadableCallError."""
    calls = [_call(number, found) for number, found in enumerate(_CALL.findall(turn))]
    content = _CALL.sub("", turn).strip() if calls else turn
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what follows a turn as one text: results of tools in their tags, and the words of the user."""
    return "\n".join(
        f"<tool_response>\n{_content(each)}\n</tool_response>" if each["role"] == "tool" else _content(each)
        for each in messages
    )


def _call(number: int, content: str) -> dict[str, Any]:
    try:
        call = json.loads(content)
    except ValueError as error:
        raise UnreadableCallError(f"the call is not a JSON object ({error})") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise UnreadableCallError("the call is not a JSON object with `name` and `arguments`")
    function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if other := [part["type"] for part in content if part["type"] != "text"]:
        raise ValueError(f"the environment sends {other[0]}; only text can be trained on")
    return "".join(part["text"] for part in content)
