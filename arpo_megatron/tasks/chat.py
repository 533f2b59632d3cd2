"""The prompt of a conversation: the model's chat template, or ChatML for a tokenizer without one."""

from collections.abc import Sequence
from typing import Any, Protocol

from arpo_megatron.tasks.base import Message


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the conversation as the model's prompt text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""


def chat_text(messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
    """Return the prompt up to the start of the model's turn: the tokenizer's chat template, or ChatML without one."""
    if tokenizer is not None and tokenizer.chat_template:
        turns = [{"role": message["role"], "content": message["content"]} for message in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    turns_text = (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return "".join(turns_text) + "<|im_start|>assistant\n"
