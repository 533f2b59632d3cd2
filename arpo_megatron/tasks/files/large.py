"""Tasks that may exceed memory: beyond a limit they are kept in a temporary file, which is mapped instead of read.

The file is in the directory for temporary files (`TMPDIR`) and has no name: it is freed with the process.
"""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, overload

from arpo_megatron.tasks.base import Task

IN_MEMORY_BYTES = 256 * 2**20
"""Text of tasks, in bytes, that is kept in memory."""
_BATCH = 512
"""Tasks of a record batch; only the last one may have fewer."""


class TaskStore:
    """Collects tasks, in memory or in a file. Call `finish` after the last one."""

    def __init__(self, limit: int = IN_MEMORY_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._tasks: list[Task] = []
        self._file: _TaskFile | None = None

    def __len__(self) -> int:
        return len(self._tasks) + (0 if self._file is None else self._file.written)

    def add(self, task: Task) -> None:
        self._tasks.append(task)
        # The messages repeat the prompt.
        self._bytes += 2 * len(task.prompt_text) + len(task.hint) + sum(map(len, task.answers))
        if self._file is None and self._bytes > self._limit:
            self._file = _TaskFile()
        while self._file is not None and len(self._tasks) >= _BATCH:
            self._file.write(self._tasks[:_BATCH])
            del self._tasks[:_BATCH]

    def finish(self) -> Sequence[Task]:
        """Return all tasks in their order."""
        if self._file is None:
            return tuple(self._tasks)
        self._file.write(self._tasks)
        return self._file.finish()


class _TaskFile:
    """An Arrow file without a name that tasks are written to."""

    def __init__(self) -> None:
        import pyarrow

        text = pyarrow.string()
        messages = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
        self._schema = pyarrow.schema(
            [
                *(("id", text), ("messages", messages), ("ground_truth", text), ("source", text)),
                *(("prompt_text", text), ("aliases", pyarrow.list_(text)), ("hint", text)),
            ]
        )
        self._file = tempfile.TemporaryFile(prefix="arpo-tasks-")  # noqa: SIM115  (mapped until the process ends)
        self._writer = pyarrow.ipc.new_file(self._file, self._schema)
        self.written = 0

    def write(self, tasks: Sequence[Task]) -> None:
        """Write the tasks as one batch."""
        import pyarrow

        rows = [{name: getattr(task, name) for name in self._schema.names} for task in tasks]
        if rows:
            self._writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=self._schema))
            self.written += len(rows)

    def finish(self) -> "TasksOnDisk":
        import pyarrow

        self._writer.close()
        self._file.flush()
        mapped = pyarrow.ipc.open_file(pyarrow.memory_map(f"/proc/self/fd/{self._file.fileno()}"))
        return TasksOnDisk(mapped, range(self.written))


class TasksOnDisk(Sequence[Task]):
    """Tasks in a mapped file; each is built when it is asked for."""

    def __init__(self, mapped: Any, numbers: range) -> None:
        self._mapped = mapped
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TasksOnDisk": ...
    def __getitem__(self, index: int | slice) -> "Task | TasksOnDisk":
        if isinstance(index, slice):
            return TasksOnDisk(self._mapped, self._numbers[index])
        batch, row = divmod(self._numbers[index], _BATCH)
        return _task(self._mapped.get_batch(batch).slice(row, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Task]:
        rows, held = [], -1
        for number in self._numbers:
            batch, row = divmod(number, _BATCH)
            if batch != held:
                rows, held = self._mapped.get_batch(batch).to_pylist(), batch
            yield _task(rows[row])


def _task(row: dict[str, Any]) -> Task:
    return Task(**{**row, "messages": tuple(row["messages"]), "aliases": tuple(row["aliases"])})
