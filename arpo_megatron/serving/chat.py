"""`arpo chat`: a conversation with a served agent in the terminal, through the official openai client."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
from rich.console import Console
from rich.text import Text

from arpo_megatron.errors import UserError

Read = Callable[[], str | None]
"""Returns the user's next message; None ends the conversation."""


def chat(url: str, key: str, *, console: Console, read: Read) -> None:
    """Hold a conversation until `read` returns None.

    Args:
        url: base address of the interface, with `/v1`.
        key: its token.
        console: receives the model's text, tool calls and results.
        read: the user.

    Raises:
        UserError: nothing answers at the address, or it refuses the token.
    """
    client = openai.OpenAI(base_url=url, api_key=key or "none", max_retries=0)
    try:
        model = client.models.list().data[0].id
    except (openai.APIError, IndexError) as error:
        raise UserError(f"{url} does not answer as a chat server: {error}") from None
    messages: list[Any] = []
    while (said := read()) is not None:
        messages.append({"role": "user", "content": said})
        try:
            answer = "".join(_shown(client, model, messages, console))
        except openai.APIError as error:
            console.print(Text(f"error: {error}", "red"))
            messages.pop()
            continue
        console.print()
        messages.append({"role": "assistant", "content": answer})


def _shown(client: openai.OpenAI, model: str, messages: list[Any], console: Console) -> Iterator[str]:
    """Print one answer as it arrives, and yield the model's text."""
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        if delta.content:
            console.print(Text(delta.content), end="")
            yield delta.content
        for step in getattr(delta, "tool_steps", None) or ():
            console.print()
            console.print(Text(f"  {step['name']} {step['status']} in {step['seconds']} s", "cyan"))
            console.print(Text("\n".join(f"  | {line}" for line in step["result"].splitlines()), "green"))


def from_terminal() -> str | None:
    """Read a line from the user; None at the end of the input or after an empty line."""
    try:
        if sys.stdin.isatty():
            return input("you: ").strip() or None
        return sys.stdin.readline().strip() or None
    except EOFError:
        return None
