r"""Tool calls and results in the text between model and tools, as pure functions.

The model writes <think>..</think>, then calls a tool (<search>query</search>, <python>code</python>) and stops there,
or <answer>..</answer> and its end-of-sequence token. A tool's answer is inserted as " <result>\n{text}\n</result>" in
the same turn (ARPO, arXiv 2507.19849, section 2). A tool that takes more than one text is called with a JSON object:
<add>{"a": 1, "b": 2}</add>.
"""

import re
from collections.abc import Sequence

from arpo_megatron.tasks.protocols.base import (
    InvalidCall,
    Malformed,
    ResultFrame,
    ToolCall,
    read_arguments,
)
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, PYTHON, ToolDefinition

STOP_STRINGS = tuple(tool.stop for tool in DEFAULT_TOOLS)
"""A generation of a job with the default tools ends after the first of these."""
ANSWER_STOP = "</answer>"
"""Ends a generation, too, if `rollout.stop_at_answer` is set."""

RESULT_FRAME = ResultFrame(" <result>\n", "\n</result>", ends_turn=False)
"""The text around a tool's answer. A result continues the model's turn."""

_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def parse_call(
    text: str, stop: str, tools: Sequence[ToolDefinition] = DEFAULT_TOOLS
) -> ToolCall | InvalidCall | Malformed:
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
    body = body[thought_length(body, f"<{name}>") :]
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


def opening_tag(tools: Sequence[ToolDefinition]) -> re.Pattern[str]:
    """Return the pattern of the tools' opening tags; group 1 is the name."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    return re.compile(rf"<({names})>" if names else r"(?!)")


def _json_call(tool: str, content: str) -> ToolCall | InvalidCall:
    """Read the arguments of a call; a blank text has none."""
    try:
        return ToolCall(tool, read_arguments(content))
    except ValueError as error:
        return InvalidCall(
            tool,
            f"Error: the text of <{tool}> is not a JSON object with its arguments ({error}). "
            f'Write <{tool}>{{"argument": value}}</{tool}>.',
        )


def thought_length(body: str, tag: str) -> int:
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
