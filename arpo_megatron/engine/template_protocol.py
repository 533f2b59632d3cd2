"""The call protocol of a model's own chat template, with calls read by SGLang's parser of that model's format."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.engine.function_calls import ParsedTurn
from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import ChatTokenizer
from arpo_megatron.tasks.protocols.base import (
    InvalidCall,
    Parsed,
    Reading,
    ResultFrame,
    ToolCall,
    read_arguments,
)
from arpo_megatron.tasks.protocols.chat_frames import tool_frame
from arpo_megatron.tasks.protocols.hermes import UNKNOWN
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition
from arpo_megatron.tasks.tags.response import parse_last_turn


@dataclass(frozen=True, slots=True)
class TemplateProtocol:
    """The model ends its turn itself; the turn's call, if there is one, is in the format of its chat template.

    A turn has one call. A turn with several, with an unknown tool, or with text that the parser takes for a call and
    cannot read gets an error as its result.
    """

    tools: tuple[ToolDefinition, ...] = DEFAULT_TOOLS
    parser: str | None = None
    """SGLang's name of the format."""
    model: Path | None = None
    """Hugging Face directory with tokenizer and chat template."""
    parse: Callable[[str, Sequence[dict[str, Any]], str], Awaitable[ParsedTurn]] | None = None
    """SGLang's parser."""

    @property
    def stops(self) -> tuple[str, ...]:
        """No stop string: a turn ends with the end-of-sequence token, which the model samples."""
        return ()

    async def read_call(self, text: str, stop: str | None) -> Reading:
        """Read the call of a turn."""
        if self.parse is None or self.parser is None:
            raise AssertionError("a protocol that reads calls has a parser")
        spoken = text.rpartition("</think>")[2]
        turn = await self.parse(spoken, [tool.function() for tool in self.tools], self.parser)
        if not turn.calls:
            return None if turn.text.strip() == spoken.strip() else _invalid("it cannot be read")
        if len(turn.calls) > 1:
            return _invalid(f"the turn has {len(turn.calls)} calls; make one call a turn")
        (call,) = turn.calls
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            return _invalid(f"there is no tool {call.name!r}; the tools are {', '.join(names)}")
        try:
            return ToolCall(call.name, read_arguments(call.arguments))
        except ValueError as error:
            return _invalid(f"its arguments are not a JSON object ({error})")

    def result_frame(self) -> ResultFrame:
        """Return what the chat template writes after a turn around a tool message, and the start of the next turn."""
        if self.model is None:
            raise AssertionError("a protocol that inserts results has a chat template")
        return tool_frame(self.model)

    def prompt(self, messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
        """Return the conversation with the tools as the template describes them."""
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError("rollout.protocol=template needs a model with a chat template")
        loaded: Any = tokenizer
        functions = [tool.function() for tool in self.tools]
        turns = [dict(message) for message in messages]
        return str(loaded.apply_chat_template(turns, tools=functions, tokenize=False, add_generation_prompt=True))

    def describe(self) -> str:
        """Return "": the template describes the tools."""
        return ""

    def read_response(self, text: str, last_turn: str, called: frozenset[str]) -> Parsed:
        """Check the answer of the last turn."""
        return parse_last_turn(last_turn, called)


def _invalid(reason: str) -> InvalidCall:
    return InvalidCall(UNKNOWN, f"Error: the call cannot be executed: {reason}.")
