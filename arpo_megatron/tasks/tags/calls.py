r"""Tool calls and results in the text between model and tools, as pure functions.

The model writes <think>..</think>, then either <search>query</search> or <python>code</python> and stops there, or
<answer>..</answer> and its end-of-sequence token. A tool's answer is inserted as " <result>\n{text}\n</result>" in the
same turn (ARPO, arXiv 2507.19849, section 2).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from arpo_megatron.utils.text import whole_characters

STOP_STRINGS = ("</search>", "</python>")
"""A generation ends after the first of these."""
ANSWER_STOP = "</answer>"
"""Ends a generation, too, if `rollout.stop_at_answer` is set."""

PYTHON = "python"
_ARGUMENT_OF_TOOL: Mapping[str, str] = MappingProxyType({"search": "query", "python": "code"})
OPENING = re.compile(r"<(search|python)>")
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_LONGEST_TOKENS = 16
"""Characters per token of a tool's answer that are tokenized at most: 10 MB of text would delay all other trees."""

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A usable call: the tool's name and its arguments as the tool service takes them."""

    tool: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A closing tool tag without a usable call before it, with the reason."""

    reason: str


def parse_call(text: str, stop: str) -> ToolCall | Malformed:
    """Read the call that ended a MODEL segment.

    Text before the last </think> that is followed by the call's opening tag is thought, and tags in it are prose. After
    it, the first opening tool tag starts the call, which reaches to `stop`. Its content may hold any text (a program
    may print tags, </think> among them) except the call's own opening tag.

    Args:
        text: the segment's whole text; text after the first `stop` belongs to the stop's last token and is ignored.
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
