"""The tag protocol between model and tools, as pure functions on text.

The model writes <think>..</think>, then either <search>query</search> or <python>code</python> and stops there, or
<answer>..</answer> and its end-of-sequence token. A tool's answer comes back as " <result>\\n{text}\\n</result>"
inside the same turn (ARPO, section 2).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from arpo_megatron.utils.text import whole_characters

STOP_STRINGS = ("</search>", "</python>")
"""A generation ends behind the first of these."""
ANSWER_STOP = "</answer>"
"""Ends a generation too where `rollout.stop_at_answer` says so, wherever it stands."""

PYTHON = "python"
_ARGUMENT_OF_TOOL: Mapping[str, str] = MappingProxyType({"search": "query", "python": "code"})
OPENING = re.compile(r"<(search|python)>")
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_LONGEST_TOKENS = 16
"""Characters a token of a tool's answer that are worth tokenizing: 10 MB of it would hold up all other trees."""

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A usable call: the tool's name and its arguments as the tool service takes them."""

    tool: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A closing tool tag without a usable call before it; `reason` says what is wrong."""

    reason: str


def parse_call(text: str, stop: str) -> ToolCall | Malformed:
    """Read the call that ended a MODEL segment.

    What stands before the last </think> that has the call's own opening tag behind it is thought, and tags in it are
    prose. Behind it the first opening tool tag begins the call, which reaches to `stop`. Its content may hold any text
    (a program may print tags, </think> among them) except the call's own opening tag once more.

    Args:
        text: the segment's whole text; anything behind the first `stop` belongs to the stop's last token and is
            ignored.
        stop: the member of `STOP_STRINGS` that ended the generation.
    """
    tool = stop.removeprefix("</").removesuffix(">")
    body = text[: text.find(stop)] if stop in text else text
    body = body[_thought_length(body, f"<{tool}>") :]
    opening = OPENING.search(body)
    if opening is None:
        return Malformed(f"{stop} without <{tool}>")
    if opening[1] != tool:
        return Malformed(f"<{opening[1]}> closed by {stop}")
    content = body[opening.end() :]
    if f"<{tool}>" in content:
        return Malformed(f"<{tool}> inside <{tool}>")
    if not content.strip():
        return Malformed(f"empty <{tool}>")
    return ToolCall(tool, {_ARGUMENT_OF_TOOL[tool]: content if tool == "python" else content.strip()})


def _thought_length(body: str, tag: str) -> int:
    """How many characters before a call that begins with `tag` are thought; without such a call, all that may be."""
    call = body.rfind(tag) if tag in body else len(body)
    end = body.rfind(_THOUGHT_END, 0, call)
    if _THOUGHT in body[max(0, end) : call]:  # the tag stands in a thought, where that one ends
        end = max(end, body.find(_THOUGHT_END, call))
    return end + len(_THOUGHT_END) if end >= 0 else 0


def find_stop(text: str, stops: Sequence[str] = STOP_STRINGS) -> str | None:
    """The stop string that ends first in `text`, None where there is none."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def ends_inside_stop(text: str, stops: Sequence[str] = STOP_STRINGS) -> bool:
    """Whether `text` ends with the beginning of a stop string.

    A generation must not be cut there: the engine looks for stop strings in the new tokens only.
    """
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def result_text(text: str) -> str:
    """What is put into the context for a tool's answer."""
    return f" <result>\n{text}\n</result>"


def result_tokens(text: str, *, encode: Encode, decode: Decode, max_tokens: int) -> list[int]:
    """Token ids of `result_text`, at most `max_tokens` of them.

    A longer answer loses its end (that of a gross one without being read: ordinary text has fewer than 16 characters a
    token); the tags around it stay, and half a character becomes U+FFFD. Tokenized alone: neither the text before nor
    special tokens have a part in it.

    Args:
        encode: text -> ids without special tokens, also where the text spells one: a page must not end the turn.
        decode: its inverse.
        max_tokens: at least what an empty result takes.

    Raises:
        ValueError: not even an empty result fits.
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
