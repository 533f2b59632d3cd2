r"""The released ARPO training files: parquet with the columns prompt, reward_model and ability.

Each row is a conversation (system and user message) with its expected answer. Reading fixes two things. Every system
prompt of the published files has a literal backspace in place of the backslash of "\boxed". Rows that cannot be trained
on are left out, logged and counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import BadRow, Message, Task
from arpo_megatron.utils.table_reader import BadRowError, FileRow, parquet_columns, read_parquet_rows

_COLUMNS = ("prompt", "reward_model")
_SOURCE_COLUMNS = ("ability", "data_source")
_KEY = "data.path="


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the conversation as the model's prompt text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""


@dataclass(frozen=True, slots=True)
class ParquetTasks:
    """The tasks of a file, in its order, and the rows that gave none."""

    tasks: tuple[Task, ...]
    bad_rows: tuple[BadRow, ...]


def read_parquet(
    path: Path, *, tokenizer: ChatTokenizer | None = None, max_prompt_tokens: int | None = None
) -> ParquetTasks:
    """Read a released training or validation file.

    Args:
        path: the parquet file.
        tokenizer: provides the chat template, if it has one, and the prompt's length.
        max_prompt_tokens: a longer prompt is a bad row; needs `tokenizer`.

    Raises:
        UserError: the file is missing or not parquet, columns are missing, or no row is usable.
    """
    tasks, bad_rows = [], []
    for row in _rows(path):
        try:
            task = _task(f"{path.stem}-{row.number}", row.value(), tokenizer)
            _check_length(task, tokenizer, max_prompt_tokens)
        except BadRowError as problem:
            bad_rows.append(BadRow(row.number, str(problem)))
        else:
            tasks.append(task)
    if not tasks:
        first = f"; the first: {bad_rows[0].reason}" if bad_rows else ""
        raise UserError(f"data.path={path}: none of its {len(bad_rows)} rows can be used{first}")
    return ParquetTasks(tuple(tasks), tuple(bad_rows))


def check_readable(path: Path) -> None:
    """Raise UserError unless `path` is a parquet file with the released columns."""
    next(iter(_rows(path)), None)


def read_texts(path: Path) -> Iterator[str]:
    """Yield the text of every usable row (messages and answer), to train a tokenizer on. Raises like `read_parquet`."""
    for task in read_parquet(path).tasks:
        yield task.prompt_text
        yield task.ground_truth


def chat_text(messages: Sequence[Message], tokenizer: ChatTokenizer | None) -> str:
    """Return the prompt up to the start of the model's turn: the tokenizer's chat template, or ChatML without one."""
    if tokenizer is not None and tokenizer.chat_template:
        turns = [{"role": message["role"], "content": message["content"]} for message in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    turns_text = (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return "".join(turns_text) + "<|im_start|>assistant\n"


def _rows(path: Path) -> Iterator[FileRow]:
    """Yield the rows after a check that the file has the released columns."""
    if not path.is_file():
        raise UserError(f"{_KEY}{path}: no such file; give {_KEY}FILE.parquet")
    found = parquet_columns(path, _KEY)
    missing = [name for name in _COLUMNS if name not in found]
    if not any(name in found for name in _SOURCE_COLUMNS):
        missing.append("ability")
    if missing:
        raise UserError(f"{_KEY}{path}: columns missing: {', '.join(missing)}; it has: {', '.join(found)}")
    yield from read_parquet_rows(path, _KEY, columns=(*_COLUMNS, *_SOURCE_COLUMNS))


def _task(task_id: str, row: Mapping[str, Any], tokenizer: ChatTokenizer | None) -> Task:
    messages = _messages(row["prompt"])
    truth = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else None
    if not isinstance(truth, str) or not truth.strip():
        raise BadRowError("the answer is missing")
    kind = next((row[name] for name in _SOURCE_COLUMNS if row.get(name)), None)
    if kind is None:
        raise BadRowError("neither ability nor data_source names the kind of question")
    source = "math" if "math" in str(kind).lower() else "qa"
    return Task(task_id, messages, truth.strip(), source, chat_text(messages, tokenizer))


def _messages(prompt: Any) -> tuple[Message, ...]:
    if not isinstance(prompt, list) or not all(isinstance(turn, dict) for turn in prompt):
        raise BadRowError("the prompt is not a list of messages")
    messages: list[Message] = []
    for turn in prompt:
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRowError("a message without role or content")
        messages.append({"role": role, "content": content.replace("\x08oxed", "\\boxed")})
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise BadRowError("the question is empty")
    return tuple(messages)


def _check_length(task: Task, tokenizer: ChatTokenizer | None, max_prompt_tokens: int | None) -> None:
    if tokenizer is None or max_prompt_tokens is None:
        return
    if len(task.prompt_text.encode()) <= max_prompt_tokens:  # no token is shorter than a byte
        return
    length = len(tokenizer.encode(task.prompt_text, add_special_tokens=False))
    if length > max_prompt_tokens:
        raise BadRowError(f"the prompt has {length} tokens, more than data.max_prompt_tokens={max_prompt_tokens}")
