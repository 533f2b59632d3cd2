"""The tag protocol as a component of the registry (`tasks.protocols.base.CallProtocol`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import ChatTokenizer, chat_text
from arpo_megatron.tasks.protocols.base import Parsed, Reading, ResultFrame
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition
from arpo_megatron.tasks.tags import calls
from arpo_megatron.tasks.tags.response import parse_response


@dataclass(frozen=True, slots=True)
class TagProtocol:
    """<name>text</name> calls a tool; its result continues the model's turn (ARPO, arXiv 2507.19849, section 2)."""

    tools: tuple[ToolDefinition, ...] = DEFAULT_TOOLS

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(tool.stop for tool in self.tools)

    async def read_call(self, text: str, stop: str | None) -> Reading:
        """Read the call before a closing tag; a turn that the model ends has none."""
        return None if stop is None else calls.parse_call(text, stop, self.tools)

    def result_frame(self) -> ResultFrame:
        """Return <result> and </result> in the same turn."""
        return calls.RESULT_FRAME

    def prompt(self, messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
        """Return the conversation; the system prompt explains the tools."""
        return chat_text(messages, tokenizer)

    def describe(self) -> str:
        """Return one line for each tool, and the rules of calls and results."""
        lines = []
        for tool in self.tools:
            if tool.text_argument is not None:
                form = f"<{tool.name}>{tool.text_argument}</{tool.name}>"
            else:
                example = ", ".join(f'"{name}": ...' for name in tool.arguments.get("properties", {}))
                form = f"<{tool.name}>{{{example}}}</{tool.name}>"
            lines.append(f"- {form}: {tool.description}".rstrip(": "))
        return (
            "You can call these tools while you reason:\n"
            + "\n".join(lines)
            + "\nStop after the closing tag. The result follows between <result> and </result>: never write one."
        )

    def read_response(self, text: str, last_turn: str, called: frozenset[str]) -> Parsed:
        """Check the tags of the whole response; `last_turn` and `called` follow from it."""
        return parse_response(text, [tool.name for tool in self.tools])


DEFAULT_PROTOCOL = TagProtocol()
"""The protocol of a job that names neither protocol nor tools."""
