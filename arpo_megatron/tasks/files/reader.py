"""The tasks of a job's question files (`data.path`)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from arpo_megatron.config import DataConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, make
from arpo_megatron.tasks.base import BadRow, Task
from arpo_megatron.tasks.chat import ChatTokenizer, chat_text
from arpo_megatron.tasks.files.large import IN_MEMORY_BYTES, TaskStore
from arpo_megatron.tasks.files.mixture import MixedTasks, shares
from arpo_megatron.tasks.files.rows import Columns
from arpo_megatron.tasks.files.sources import numbered
from arpo_megatron.utils.table_reader import BadRowError, FileRow

_SURROGATE = re.compile("[\ud800-\udfff]")
_CHECKED_ROWS = 1000
"""Rows of which one must be usable before a job starts."""


@dataclass(frozen=True, slots=True)
class FileTasks:
    """The tasks of `data.path` in order, and the rows that gave none."""

    tasks: Sequence[Task]
    """`MixedTasks` for a mixture."""
    bad_rows: tuple[BadRow, ...]

    def split(self, held_out: int) -> tuple[Sequence[Task], Sequence[Task]]:
        """Split into training and held-out tasks: the last ones, of a mixture from each data set by its weight.

        Raises:
            UserError: no training task is left.
        """
        parts = self.tasks.parts if isinstance(self.tasks, MixedTasks) else ((1.0, self.tasks),)
        most = [len(tasks) - 1 for _, tasks in parts]
        kept = shares([weight for weight, _ in parts], held_out, [0] * len(parts), most)
        if sum(kept) < held_out:
            raise UserError(
                f"data.path: {len(self.tasks)} usable rows are too few for data.held_out={held_out} and a training task"
            )
        cuts = [(tasks, len(tasks) - number) for (_, tasks), number in zip(parts, kept, strict=True)]
        train = [(weight, tasks[:cut]) for (weight, _), (tasks, cut) in zip(parts, cuts, strict=True)]
        held = [task for tasks, cut in cuts for task in tasks[cut:]]
        return train[0][1] if len(train) == 1 else MixedTasks(train), held


def read_tasks(data: DataConfig, tokenizer: ChatTokenizer | None = None, *, limit: int = IN_MEMORY_BYTES) -> FileTasks:
    """Read the question files of a job.

    Args:
        data: path, reader, columns and largest prompt.
        tokenizer: provides the chat template, if it has one, and the prompt's length; None: lengths are not checked.
        limit: bytes of text per data set beyond which its tasks are kept on disk.

    Raises:
        UserError: a file is missing or unreadable, or has no usable row.
    """
    read, bad_rows = [], list[BadRow]()
    names = _names([path for path, _ in data.sources])
    for (path, weight), name in zip(data.sources, names, strict=True):
        store, begun = TaskStore(limit), len(bad_rows)
        for row in _rows(data, path):
            try:
                store.add(_task(data, f"{name}-{row.number}", row, tokenizer))
            except BadRowError as problem:
                bad_rows.append(BadRow(row.number, str(problem), row.where))
        if not len(store):
            raise _useless(path, bad_rows[begun:])
        read.append((weight, store.finish()))
    return FileTasks(read[0][1] if len(read) == 1 else MixedTasks(read), tuple(bad_rows))


def check_readable(data: DataConfig) -> None:
    """Raise UserError unless each file of `data.path` has a usable question among its first rows."""
    for path, _ in data.sources:
        bad_rows = []
        for row in islice(_rows(data, path), _CHECKED_ROWS):
            try:
                _task(data, "", row, None)
                break
            except BadRowError as problem:
                bad_rows.append(BadRow(row.number, str(problem), row.where))
        else:
            raise _useless(path, bad_rows)


def read_texts(data: DataConfig) -> Iterator[str]:
    """Yield the text of every usable row (messages and answer), to train a tokenizer on. Raises like `read_tasks`."""
    for task in read_tasks(data).tasks:
        yield task.prompt_text
        yield from task.answers


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a different name for each data set, with which the ids of its tasks begin."""
    names = [path.stem if path.is_file() else path.name for path in paths]
    if len(set(names)) < len(names):  # math/train.parquet and qa/train.parquet
        names = [f"{path.parent.name}-{name}" for path, name in zip(paths, names, strict=True)]
    return names if len(set(names)) == len(names) else [f"{name}-{number}" for number, name in enumerate(names)]


def _useless(path: Path, bad_rows: Sequence[BadRow]) -> UserError:
    first = f"; the first: {bad_rows[0].reason}" if bad_rows else ""
    return UserError(f"data.path={path}: none of its {len(bad_rows)} rows can be used{first}")


def _rows(data: DataConfig, path: Path) -> Iterator[FileRow]:
    return numbered(make(ExtensionPoint.DATA_READER, data.reader, {"split": data.split}), path)


def _task(data: DataConfig, task_id: str, row: FileRow, tokenizer: ChatTokenizer | None) -> Task:
    columns, value = Columns({str(name): column for name, column in data.columns.items()}, data.verifier), row.value()
    messages, answers, kind = columns.read(value)
    text, hint = chat_text(messages, tokenizer), columns.hint(value)
    if _SURROGATE.search("".join((text, hint, *answers))):
        raise BadRowError("half of a surrogate pair, which is no character")
    if tokenizer is not None and len(text.encode()) > data.max_prompt_tokens:  # no token is shorter than a byte
        length = len(tokenizer.encode(text, add_special_tokens=False))
        if length > data.max_prompt_tokens:
            raise BadRowError(
                f"the prompt has {length} tokens, more than data.max_prompt_tokens={data.max_prompt_tokens}"
            )
    return Task(task_id, messages, answers[0], kind, text, answers[1:], hint)
