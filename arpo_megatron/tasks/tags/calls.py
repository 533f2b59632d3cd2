r"""Tool calls and results in the text between model and tools, as pure functions.

The model writes <think>..</think>, then calls a tool (<search>query</search>, <python>code</python>) and stops there,
or <answer>..</answer> and its end-of-sequence token. A tool's answer is inserted as " <result>\n{text}\n</result>" in
the same turn (ARPO, arXiv 2507.19849, section 2). A tool that takes more than one text is called with a JSON object:
<add>{"a": 1, "b": 2}</add>.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arpo_megatron.tasks.tags.tools import DEFAULT_TOOLS, PYTHON, TagTool
from arpo_megatron.utils.text import whole_characters

STOP_STRINGS = tuple(tool.stop for tool in DEFAULT_TOOLS)
"""A generation of a job with the default tools ends after the first of these."""
ANSWER_STOP = "</answer>"
"""Ends a generation, too, if `rollout.stop_at_answer` is set."""

INVALID_JSON = "invalid_json"
"""Status of a call whose text is not a JSON object, although its tool needs one."""
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_DEEPEST = 32
"""Levels of nested JSON that a call may have; the formats that store it have limits of their own."""
_LONGEST_TOKENS = 16
"""Characters per token of a tool's answer that are tokenized at most: 10 MB of text would delay all other trees."""

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A usable call: the tool's name and its arguments as the tool service takes them."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidJson:
    """A call whose text should be a JSON object and is not. It is answered with an error; no tool runs."""

    tool: str
    reason: str

    @property
    def status(self) -> str:
        """Status of the call in its record."""
        return INVALID_JSON

    @property
    def result(self) -> str:
        """The text of its result."""
        return (
            f"Error: the text of <{self.tool}> is not a JSON object with its arguments ({self.reason}). "
            f'Write <{self.tool}>{{"argument": value}}</{self.tool}>.'
        )


@dataclass(frozen=True, slots=True)
class Notice:
    """A call that is answered with a text of ours; no tool runs."""

    tool: str
    status: str
    """Status of the call in its record."""
    result: str
    """The text of its result."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A closing tool tag without a usable call before it, with the reason."""

    reason: str


def parse_call(text: str, stop: str, tools: Sequence[TagTool] = DEFAULT_TOOLS) -> ToolCall | InvalidJson | Malformed:
    """Read the call that ended a MODEL segment.

    Text before the last </think> that is followed by the call's opening tag is thought, and tags in it are prose. After
    it, the first opening tool tag starts the call, which reaches to `stop`. Its content may hold any text (a program
    may print tags, </think> among them) except the call's own opening tag.

    Args:
        text: the segment's whole text; text after the first `stop` belongs to the stop's last token and is ignored.
        stop: the closing tag of the tool that ended the generation.
        tools: the tools that the policy may call.
    """
    tool = next(tool for tool in tools if tool.stop == stop)
    name = tool.name
    body = text[: text.find(stop)] if stop in text else text
    body = body[_thought_length(body, f"<{name}>") :]
    opening = opening_tag(tools).search(body)
    if opening is None:
        return Malformed(f"{stop} without <{name}>")
    if opening[1] != name:
        return Malformed(f"<{opening[1]}> closed by {stop}")
    content = body[opening.end() :]
    if f"<{name}>" in content:
        return Malformed(f"<{name}> inside <{name}>")
    if tool.text_argument is None:
        return _json_call(name, content)
    if not content.strip():
        return Malformed(f"empty <{name}>")
    return ToolCall(name, {tool.text_argument: content if name == PYTHON else content.strip()})


def opening_tag(tools: Sequence[TagTool]) -> re.Pattern[str]:
    """Return the pattern of the tools' opening tags; group 1 is the name."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    return re.compile(rf"<({names})>" if names else r"(?!)")


def _json_call(tool: str, content: str) -> ToolCall | InvalidJson:
    """Read the arguments of a call; a blank text has none."""
    try:
        arguments = json.loads(content) if content.strip() else {}
        if not isinstance(arguments, dict):
            raise ValueError(f"it is a {type(arguments).__name__}")
        _check_portable(arguments)
    except UnicodeEncodeError:
        return InvalidJson(tool, "half a character")
    except RecursionError:
        return InvalidJson(tool, "nested too deeply")
    except ValueError as error:
        return InvalidJson(tool, str(error)[:200])
    return ToolCall(tool, arguments)


def _check_portable(value: object, depth: int = 0) -> None:
    """Raise ValueError for a value that the tool service or the tree's record cannot take."""
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} levels")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer with more than 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, each in value.items():
            key.encode()
            _check_portable(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_portable(each, depth + 1)


def _thought_length(body: str, tag: str) -> int:
    """Return the number of characters before a call that starts with `tag` that are thought; without a call, all that
    may be.
    """
    call = body.rfind(tag) if tag in body else len(body)
    end = body.rfind(_THOUGHT_END, 0, call)
    if _THOUGHT in body[max(0, end) : call]:  # the tag is part of a thought
        end = max(end, body.find(_THOUGHT_END, call))
    return end + len(_THOUGHT_END) if end >= 0 else 0


def find_stop(text: str, stops: Sequence[str] = STOP_STRINGS) -> str | None:
    """Return the stop string that ends first in `text`, or None."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def ends_inside_stop(text: str, stops: Sequence[str] = STOP_STRINGS) -> bool:
    """Whether `text` ends with the beginning of a stop string.

    A generation must not be cut there, because the engine searches for stop strings in new tokens only.
    """
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def result_text(text: str) -> str:
    """Return the text that is inserted into the context for a tool's answer."""
    return f" <result>\n{text}\n</result>"


def result_tokens(text: str, *, encode: Encode, decode: Decode, max_tokens: int) -> list[int]:
    """Return the token ids of `result_text`, at most `max_tokens` of them.

    A longer answer loses its end, and an extremely long one is cut before it is tokenized: ordinary text has fewer than
    16 characters per token. The tags around it stay, and half a character becomes U+FFFD. The text is tokenized alone,
    without the text before it and without special tokens.

    Args:
        text: the tool's answer.
        encode: text -> ids without special tokens, even if the text spells one: a page must not end the turn.
        decode: inverse of `encode`.
        max_tokens: at least the length of an empty result.

    Raises:
        ValueError: an empty result does not fit.
    """
    text = whole_characters(text[: _LONGEST_TOKENS * max_tokens])
    ids = list(encode(result_text(text)))
    if len(ids) <= max_tokens:
        return ids
    keep = max_tokens - len(encode(result_text("")))
    if keep < 0:
        raise ValueError(f"max_tool_tokens={max_tokens} cannot hold the tags of an empty result")
    body = list(encode(text))
    while True:
        # A cut through a multi-byte character decodes to a replacement character at the end.
        ids = list(encode(result_text(decode(body[:keep]).rstrip("\ufffd"))))
        if len(ids) <= max_tokens or keep == 0:
            return ids
        keep = max(0, keep - (len(ids) - max_tokens))
