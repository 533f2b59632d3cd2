"""`arpo chat`: a conversation with a served agent in the terminal, through the official openai client."""

import sys
from collections.abc import Callable
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.text import Text

from arpo_megatron.errors import UserError
from arpo_megatron.monitor.tree_view import printable
from arpo_megatron.serving import WRONG_TOKEN
from arpo_megatron.utils.chat_client import UnreadableReplyError, model_names, open_client, with_version
from arpo_megatron.utils.signals import run_in_loop

_SHADES = ((1.5, "bold red"), (0.7, "red"), (0.2, "yellow"))
"""Least entropy in nats of each color."""
_MODELS_DEADLINE_S = 120.0
"""Time for the list of models; an agent that has just been started loads its tokenizer first."""

Read = Callable[[], str | None]
"""Returns the user's next message; None ends the conversation."""


def chat(url: str, key: str, *, console: Console, read: Read, show_entropy: bool = False) -> bool:
    """Hold a conversation until `read` returns None. Return False if there were questions, and none has an answer.

    Args:
        url: address of the interface, with or without `/v1`.
        key: its token.
        console: receives the model's text, tool calls and results.
        read: the user.
        show_entropy: color the text by the entropy of its tokens, and print the mean of each turn.

    Raises:
        UserError: nothing answers at the address, or it refuses the token.
    """
    model = run_in_loop(_first_model(url, key))
    client = openai.OpenAI(base_url=with_version(url), api_key=key or "none", max_retries=0)
    messages: list[Any] = []
    failed = False
    while (said := read()) is not None:
        messages.append({"role": "user", "content": said})
        try:
            answer = _answer(client, model, messages, console, show_entropy)
        except (openai.APIError, httpx.HTTPError, ValueError) as error:  # also a stream that is cut, or no JSON
            console.print(Text(f"error: {_harmless(str(error))}", "red"))
            messages.pop()
            failed = True
            continue
        console.print()
        messages.append(answer)
    return bool(messages) or not failed


async def _first_model(url: str, key: str) -> str:
    """Return the name of the server's first model. Raises UserError as `chat` does."""
    try:
        async with open_client(with_version(url), key=key, deadline_s=_MODELS_DEADLINE_S, retries=0) as client:
            return (await model_names(client))[0]
    except openai.AuthenticationError:
        raise UserError(f"{url} refuses the request: {WRONG_TOKEN}") from None
    except IndexError:
        raise UserError(f"{url} does not answer as a chat server: it has no model") from None
    except (openai.APIError, httpx.InvalidURL, UnreadableReplyError) as error:
        raise UserError(f"{url} does not answer as a chat server: {error}") from None


def _answer(
    client: openai.OpenAI, model: str, messages: list[Any], console: Console, show_entropy: bool
) -> dict[str, Any]:
    """Print one answer as it arrives, and return its message. The next turn needs the results of its tools, too."""
    turn: list[float] = []
    text, steps, warnings = "", list[Any](), list[str]()
    answer = client.chat.completions.create(model=model, messages=messages, stream=True, logprobs=show_entropy)
    for chunk in answer:
        warnings += (chunk.model_extra or {}).get("warnings", ())
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        entropies = _entropies(chunk.choices[0].logprobs)
        turn += entropies
        if delta.content:
            console.print(Text(_harmless(delta.content), _style(entropies)), end="")
            text += delta.content
        for step in getattr(delta, "tool_steps", None) or ():
            steps.append(step)
            _print_mean(turn, console)
            console.print()
            console.print(Text(_harmless(f"  {step['name']} {step['status']} in {step['seconds']} s"), "cyan"))
            console.print(Text("\n".join(f"  | {printable(line)}" for line in step["result"].splitlines()), "green"))
    _print_mean(turn, console)
    for warning in warnings:
        console.print(Text(f"\n{_harmless(warning)}", "red"), end="")
    return {"role": "assistant", "content": text, "tool_steps": steps}


def _harmless(text: str) -> str:
    """Return lines of text that cannot control the terminal: models and tools write what they want."""
    return "\n".join(map(printable, text.split("\n")))


def _entropies(logprobs: Any) -> list[float]:
    """Return the entropies that the interface adds to OpenAI's log-probs, in nats."""
    content = (logprobs and logprobs.content) or ()
    return [value for token in content if (value := getattr(token, "entropy", None)) is not None]


def _style(entropies: list[float]) -> str:
    """Return the color of a text: the largest entropy of its tokens decides."""
    largest = max(entropies, default=0.0)
    return next((color for least, color in _SHADES if largest >= least), "")


def _print_mean(turn: list[float], console: Console) -> None:
    """Print the mean entropy of a turn, and forget the turn."""
    if turn:
        console.print(Text(f"  [{sum(turn) / len(turn):.3f} nats per token, at most {max(turn):.2f}]", "bright_black"))
        turn.clear()


def from_terminal() -> str | None:
    """Read a line from the user; None at the end of the input or after an empty line."""
    try:
        if sys.stdin.isatty():
            return input("you: ").strip() or None
        return sys.stdin.readline().strip() or None
    except EOFError:
        return None
