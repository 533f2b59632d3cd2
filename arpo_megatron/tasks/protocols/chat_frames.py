"""The text that a model's chat template writes between two of its turns, read from rendered conversations."""

from functools import lru_cache
from json import dumps
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.protocols.base import ResultFrame

_ANSWER = 'answer-of-the-"tool"'
"""Stands for a result in a rendered conversation. Its quotes show whether the template writes results as JSON."""
_CALL_ID = "call00000"
_CHATML = ResultFrame("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


@lru_cache
def tool_frame(model: Path) -> ResultFrame:
    """Return the text around a tool's result, after the token that ends the model's turn.

    Raises:
        UserError: there is no template, it has no tool messages, or does not end a turn with the end-of-sequence token.
    """
    tokenizer, where = _load(model), f"rollout.protocol=template: the chat template of {model}"
    if not tokenizer.chat_template:
        raise UserError(f"{where} is missing: choose rollout.protocol=hermes or tags")
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "tool", "arguments": {"argument": "value"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "tool", "tool_call_id": _CALL_ID, "content": _ANSWER}
    return _frame(tokenizer, turn, result, where, ": choose rollout.protocol=hermes or tags")


@lru_cache
def message_frame(model: Path) -> ResultFrame:
    """Return the text around a message of the user, after the token that ends the model's turn; ChatML by default.

    Raises:
        UserError: the template does not end a turn with the end-of-sequence token.
    """
    tokenizer = _load(model)
    if not tokenizer.chat_template:
        return _CHATML
    turn, message = {"role": "assistant", "content": "answer"}, {"role": "user", "content": _ANSWER}
    return _frame(tokenizer, turn, message, f"rollout.environment: the chat template of {model}", "")


def _load(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


def _frame(tokenizer: Any, turn: dict[str, Any], message: dict[str, Any], where: str, fix: str) -> ResultFrame:
    turns = [{"role": "user", "content": "question"}, turn]
    try:
        called = str(tokenizer.apply_chat_template(turns, tokenize=False))
        answered = str(tokenizer.apply_chat_template([*turns, message], tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever the template raises
        raise UserError(f"{where} refuses a {message['role']} message: {error}") from None
    end, escaped = str(tokenizer.eos_token), dumps(_ANSWER)[1:-1]
    written = escaped if escaped in answered else _ANSWER
    if not answered.startswith(called) or end not in called or written not in answered[len(called) :]:
        raise UserError(f"{where} does not append a {message['role']} message after {end}{fix}")
    before, _, after = answered[called.rindex(end) + len(end) :].partition(written)
    return ResultFrame(before, after, as_json=written is escaped)
