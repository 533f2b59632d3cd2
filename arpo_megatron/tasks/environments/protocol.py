"""The call protocol of environments: each turn is an action, and the observation is the next message of the user."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import ChatTokenizer, chat_text
from arpo_megatron.tasks.environments.base import ENVIRONMENT
from arpo_megatron.tasks.protocols.base import Malformed, Parsed, Reading, ResultFrame, ToolCall
from arpo_megatron.tasks.protocols.chat_frames import message_frame
from arpo_megatron.tasks.protocols.tools import ToolDefinition


@dataclass(frozen=True, slots=True)
class EnvironmentProtocol:
    """The model ends its turn itself. A turn without text is malformed."""

    model: Path | None = None
    """Hugging Face directory with tokenizer and chat template."""
    tools: tuple[ToolDefinition, ...] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    async def read_call(self, text: str, stop: str | None) -> Reading:
        """Return the turn as an action."""
        return ToolCall(ENVIRONMENT, {"action": text}) if text.strip() else Malformed("an empty turn")

    def result_frame(self) -> ResultFrame:
        """Return a message of the user around the observation, and the start of the model's next turn."""
        if self.model is None:
            raise AssertionError("a protocol that inserts observations has a model")
        return message_frame(self.model)

    def prompt(self, messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
        return chat_text(messages, tokenizer)

    def describe(self) -> str:
        """Return "": the environment's first messages explain it."""
        return ""

    def read_response(self, text: str, last_turn: str, called: frozenset[str]) -> Parsed:
        """Return the last turn as the answer; the environment has judged it."""
        return Parsed("", last_turn, called)
