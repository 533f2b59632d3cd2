"""The interface of a call protocol, and what the protocols share: calls, their check, and the tokens of a result."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import ChatTokenizer
from arpo_megatron.tasks.protocols.tools import ToolDefinition
from arpo_megatron.utils.text import whole_characters

INVALID_CALL = "invalid_call"
"""Status of a call that cannot be executed as it is written: text that is no JSON object, or a tool that is unknown."""
_DEEPEST = 32
"""Levels of nested JSON that a call may have; the formats that store it have limits of their own."""
_LONGEST_TOKENS = 16
"""Characters per token of a tool's answer that are tokenized at most: 10 MB of text would delay all other trees."""


class TextCodec(Protocol):
    """Converts text to token ids without adding special tokens, and back with special tokens kept."""

    vocabulary_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """Encode text; the spelling of a special token in it becomes ordinary tokens."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A usable call: the tool's name and its arguments as the tool service takes them."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A call that cannot be executed as it is written. The model reads an error; no tool runs."""

    tool: str
    """The tool, or a name for calls of which it cannot be read."""
    result: str
    """The text of its result."""

    @property
    def status(self) -> str:
        """Status of the call in its record."""
        return INVALID_CALL


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
    """Text in the form of a call from which no call can be read, with the reason. It ends the trajectory."""

    reason: str


Reading = ToolCall | InvalidCall | Malformed | None
"""The call that ends a turn; None: there is none, so the trajectory ends."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The format and the answer of a whole response."""

    reason: str
    """The first rule that is broken; empty if none is."""
    answer: str | None
    """Content of the last box in the answer; None if the format is broken."""
    tools: frozenset[str]
    """Names of the tools that were called and answered."""


class CallProtocol(Protocol):
    """How the policy calls its tools. An implementation is a frozen dataclass that the registry constructs.

    Its fields are filled by name: `tools` (`ToolDefinition`s), `model` (Hugging Face directory of tokenizer and chat
    template, or None), `parser` (`rollout.tool_call_parser`) and `parse` (the engine's parser, or None where no
    engine is).
    """

    @property
    def tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that the policy may call."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a turn with a call. The engine keeps the token that completes one."""

    async def read_call(self, text: str, stop: str | None) -> Reading:
        """Read the call that ended a turn.

        Args:
            text: the text of the turn, without its end-of-sequence token.
            stop: the stop string that ended it; None: the model ended it.
        """

    def result_frame(self) -> "ResultFrame":
        """Return the text around a tool's answer, between two turns of the model."""

    def prompt(self, messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
        """Return the text up to the start of the model's turn, with the tools if the protocol describes them there."""

    def describe(self) -> str:
        """Return the part of a system prompt that explains how to call the tools; "" if `prompt` adds it."""

    def read_response(self, text: str, last_turn: str, called: frozenset[str]) -> Parsed:
        """Check the format of a finished response.

        Args:
            text: everything after the prompt, tool results included.
            last_turn: what the model has written after the last tool result.
            called: names of the tools that were called, also if a limit or an error answered.
        """


def read_arguments(text: str) -> dict[str, Any]:
    """Read the JSON object of a call. Raises ValueError with the reason; a blank text is an empty object."""
    try:
        arguments = json.loads(text) if text.strip() else {}
        if not isinstance(arguments, dict):
            raise ValueError(f"it is a {type(arguments).__name__}")
        _check_portable(arguments)
    except UnicodeEncodeError:
        raise ValueError("half a character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(str(error)[:200]) from None
    return arguments


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


@dataclass(frozen=True, slots=True)
class ResultFrame:
    """The text around a tool's answer.

    A result is tokenized without the text before it. A special token that the answer spells is ordinary text, because
    a page must not end the model's turn.
    """

    before: str
    after: str
    ends_turn: bool = True
    """The frame ends the model's turn and begins the next one, so it may spell special tokens."""
    as_json: bool = False
    """The answer stands in a JSON string."""

    def text(self, answer: str) -> str:
        """Return an answer with the text around it."""
        return f"{self.before}{self._written(answer)}{self.after}"

    def tokens(self, answer: str, codec: TextCodec, max_tokens: int) -> list[int]:
        """Return the tokens of a result, at most `max_tokens` of them.

        A longer answer loses its end, and an extremely long one is cut before it is tokenized: ordinary text has fewer
        than 16 characters per token. The frame stays, and half a character becomes U+FFFD.

        Raises:
            ValueError: an empty result does not fit.
        """
        answer = whole_characters(answer[: _LONGEST_TOKENS * max_tokens])
        ids = self._encode(answer, codec)
        if len(ids) <= max_tokens:
            return ids
        keep = max_tokens - len(self._encode("", codec))
        if keep < 0:
            raise ValueError(f"max_tool_tokens={max_tokens} cannot hold an empty tool result")
        body = codec.encode_plain(answer)
        while True:
            # A cut through a multi-byte character decodes to a replacement character at the end.
            ids = self._encode(codec.decode(body[:keep]).rstrip("\ufffd"), codec)
            if len(ids) <= max_tokens or keep == 0:
                return ids
            keep = max(0, keep - (len(ids) - max_tokens))

    def _encode(self, answer: str, codec: TextCodec) -> list[int]:
        if not self.ends_turn:
            return codec.encode_plain(self.text(answer))
        written = codec.encode_plain(self._written(answer))
        return [*codec.encode(self.before), *written, *codec.encode(self.after)]

    def _written(self, answer: str) -> str:
        return json.dumps(answer, ensure_ascii=False)[1:-1] if self.as_json else answer
