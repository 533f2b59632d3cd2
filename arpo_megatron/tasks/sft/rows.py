"""Rows of conversations: {"messages": [{"role", "content"}, ...]}, the format of TRL, LLaMA-Factory and OpenAI's
fine-tuning.

Rows of sharegpt's form are read too, `conversations` with `from` and `value` and perhaps a `system` text: the authors
of ARPO train on them.

A row may hold `tools` (a list, or a list as JSON text), which the chat template shows to the model. A message may hold
fields that its template knows (`tool_calls`, `name`, `reasoning_content`, ...). An assistant message with `"train":
false` or `"weight": 0` is context only. Rows that cannot be trained on are logged and counted.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.utils.table_reader import BadRowError, FileRow, parquet_columns, read_rows

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = (".jsonl", ".json", ".parquet")
_KEY = "sft.data="
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One checked row of SFT data: messages, their loss masks and tools."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages as the chat template takes them; empty fields are left out."""
    trained: tuple[bool, ...]
    """Whether the tokens of each message carry loss; only those of assistant messages may."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools that the template offers to the model; None: none."""


def check_file(path: Path) -> None:
    """Raise UserError unless `sft.data` may be this file."""
    if path.suffix not in FORMATS:
        raise UserError(f"{_KEY}{path}: conversations are read from {', '.join(FORMATS)} files")
    if not path.is_file():
        raise UserError(f"{_KEY}{path}: no such file")


def conversation_rows(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a file of conversations (`sft.data`).

    Raises:
        UserError: the file is missing, has none of `FORMATS`, or is a table without conversations.
    """
    check_file(path)
    if path.suffix != ".parquet":
        yield from read_rows(path, _KEY)
        return
    found = parquet_columns(path, _KEY)
    if not {"messages", "conversations"} & set(found):
        raise UserError(f"{_KEY}{path}: no column messages or conversations; it has: {', '.join(found)}")
    for row in read_rows(path, _KEY, columns=("messages", "conversations", "system", "tools")):
        yield replace(row, found=_without_nulls(row.found))


def check_row(row: Any) -> Conversation:
    """Return the conversation of a row. Raises BadRowError if it cannot be trained on."""
    given = _given_messages(row)
    messages, trained = [], []
    for number, message in enumerate(given):
        if not isinstance(message, dict):
            raise BadRowError(f"message {number} is not an object")
        kept = {key: value for key, value in message.items() if value is not None}
        trained.append(_is_trained(number, kept))
        messages.append(_message(number, kept))
    if not any(trained):
        raise BadRowError("no assistant turn to learn")
    return Conversation(tuple(messages), tuple(trained), _tools(row.get("tools")))


def _given_messages(row: Any) -> list[Any]:
    """Return the messages of a row, those of sharegpt under OpenAI's names."""
    if not isinstance(row, dict) or not {"messages", "conversations"} & set(row):
        raise BadRowError('no "messages" or "conversations" list')
    given = row.get("messages", row.get("conversations"))
    if not isinstance(given, list) or not given:
        raise BadRowError("an empty list of messages")
    messages = [_renamed(message) for message in given]
    first = messages[0]
    if (system := row.get("system")) and not (isinstance(first, dict) and first.get("role") == "system"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _renamed(message: Any) -> Any:
    """Return sharegpt's `from` and `value` as `role` and `content`; another message as it is."""
    if not isinstance(message, dict) or "from" not in message or "value" not in message:
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**rest, "role": _SHAREGPT.get(message["from"], message["from"]), "content": message["value"]}


def _without_nulls(value: Any) -> Any:
    """Remove nulls: a column has one type, so fields that only other rows have are null in this one."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_trained(number: int, message: dict[str, Any]) -> bool:
    """Whether the message carries loss; removes the fields that mark this."""
    marks = {name: message.pop(name) for name in ("train", "weight") if name in message}
    for name, value in marks.items():
        if isinstance(value, str) or value not in (0, 1):
            raise BadRowError(f"message {number}: {name}={value!r} is neither true nor false")
    return message.get("role") == "assistant" and all(marks.values())


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise BadRowError(f"message {number} has no role of {', '.join(ROLES)}, but {role!r}")
    if role in ("system", "developer") and number:
        raise BadRowError(f"message {number}: a {role} message comes first or not at all")
    content = _text(number, message.get("content", ""))
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise BadRowError(f"message {number}: a {role} message with tool_calls")
    if not content.strip() and role != "tool" and not calls:
        raise BadRowError(f"message {number} has no content")
    if calls is not None:
        message = {**message, "tool_calls": _tool_calls(number, calls)}
    return {**message, "content": content}


def _text(number: int, content: Any) -> str:
    """Return content as text, also if it comes in OpenAI's list of parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise BadRowError(f"message {number}: the content is not text")
    return content


def _tool_calls(number: int, calls: Any) -> list[Any]:
    """Parse arguments given as JSON text (as OpenAI writes them): templates expect the object and would quote text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRowError(f"message {number}: tool_calls is not a list of calls")
    parsed = []
    for call in calls:
        inner = call.get("function", call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRowError(f"message {number}: a tool call without a name")
        if isinstance(arguments := inner.get("arguments"), str):
            try:
                inner = {**inner, "arguments": json.loads(arguments)}
            except ValueError:
                raise BadRowError(f"message {number}: the arguments of {inner['name']} are not JSON") from None
        parsed.append({**call, "function": inner} if "function" in call else inner)
    return parsed


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise BadRowError("tools is neither a list nor JSON text of one") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("tools is not a list of tools")
    return tuple(tools)
