"""Reader of users' data files: JSON lines, JSON, CSV, parquet and Arrow.

An unreadable file is a `UserError` that names the file, the line and the problem. A single line that is not JSON is a
row too: the caller decides whether to skip it.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from arpo_megatron.errors import UserError

FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_BATCH_ROWS = 256


class BadRowError(ValueError):
    """Why a row cannot be used."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """Content and position of one row of a file."""

    number: int
    """Counted from 0, without empty lines."""
    where: str
    """File and line, for error messages."""
    found: Any
    """Content of the row, or the BadRowError with the reason why it cannot be read."""

    def value(self) -> Any:
        """Return the content. Raises BadRowError if it cannot be read."""
        if isinstance(self.found, BadRowError):
            raise self.found
        return self.found

    def needed(self) -> Any:
        """Return the content of a row without which the file is useless. Raises UserError."""
        if isinstance(self.found, BadRowError):
            raise self.refused(str(self.found))
        return self.found

    def refused(self, reason: str) -> UserError:
        """Return an error that names the row."""
        return UserError(f"{self.where}: {reason}")


def read_rows(
    path: Path, key: str = "", *, columns: Sequence[str] | None = None, content: bytes | None = None
) -> Iterator[FileRow]:
    """Yield the rows of a table, the elements of a JSON array, or the lines of a file of JSON lines.

    Args:
        path: the file. Its suffix decides the format; any suffix outside `FORMATS` means JSON lines.
        key: text before the path in messages, e.g. "--train-data ".
        columns: columns to read from a parquet file that has them; None for all.
        content: content of the file, if it was read already.

    Raises:
        UserError: there is no such file, or it does not have the format of its suffix.
    """
    with _opened(path, key, content) as file:
        match path.suffix:
            case ".parquet":
                yield from _parquet(file, f"{key}{path}", columns)
            case ".arrow":
                yield from _arrow(file, f"{key}{path}")
            case ".csv":
                yield from _csv(file, f"{key}{path}")
            case ".json":
                yield from _json(file, f"{key}{path}")
            case _:
                yield from _json_lines(file, f"{key}{path}")


def parquet_columns(path: Path, key: str = "") -> list[str]:
    """Return the column names of a parquet file. Raises as `read_rows` does."""
    import pyarrow
    import pyarrow.parquet

    with _opened(path, key, None) as file:
        try:
            return list(pyarrow.parquet.read_schema(file).names)
        except (pyarrow.ArrowException, OSError) as error:
            raise _no_parquet(f"{key}{path}", error) from None


def _opened(path: Path, key: str, content: bytes | None) -> BinaryIO:
    if content is not None:
        return io.BytesIO(content)
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UserError(f"{key}{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{key}{path}: {error.strerror or error}") from None


def _parquet(file: BinaryIO, name: str, columns: Sequence[str] | None) -> Iterator[FileRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            # If it has none of them, every row is read whole, so that messages show its columns.
            kept = None if columns is None else [each for each in columns if each in table.schema_arrow.names] or None
            for batch in table.iter_batches(_BATCH_ROWS, columns=kept):
                for row in batch.to_pylist():
                    yield FileRow(number, f"{name}, row {number} (from 0)", row)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise _no_parquet(name, error) from None


def _arrow(file: BinaryIO, name: str) -> Iterator[FileRow]:
    """Read an Arrow stream, as Hugging Face datasets save them."""
    import pyarrow

    number = 0
    try:
        with pyarrow.ipc.open_stream(file) as batches:
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                        yield FileRow(number, f"{name}, row {number} (from 0)", row)
                        number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: not a readable Arrow file: {reason}") from None


def _no_parquet(name: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{name}: not a readable parquet file: {reason}")


def _csv(file: BinaryIO, name: str) -> Iterator[FileRow]:
    line = 0

    def texts() -> Iterator[str]:
        nonlocal line
        for line, text in _lines(file, name, newline=""):  # noqa: B007  (named in errors)
            yield text

    try:  # csv decides where a row ends
        for number, row in enumerate(csv.DictReader(texts())):
            yield FileRow(number, f"{name}, line {line}", row)
    except csv.Error as error:
        raise UserError(f"{name}, line {line}: not CSV: {error}") from None


def _json(file: BinaryIO, name: str) -> Iterator[FileRow]:
    """Read an array, or JSON lines in a file that is named .json."""
    text = "".join(line for _, line in _lines(file, name, newline=None))
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise UserError(f"{name}, line {error.lineno}: {_not_json(error)}") from None
        file.seek(0)
        yield from _json_lines(file, name)
        return
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: {_not_json(error)}") from None
    for number, row in enumerate(found if isinstance(found, list) else [found]):
        yield FileRow(number, f"{name}, row {number} (from 0)", row)


def _json_lines(file: BinaryIO, name: str) -> Iterator[FileRow]:
    number = 0
    for line, text in _lines(file, name, newline=None):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            found = BadRowError(_not_json(error))
        yield FileRow(number, f"{name}, line {line}", found)
        number += 1


def _not_json(error: Exception) -> str:
    """Return a message without the error's line number, which counts within the parsed text."""
    reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON: {reason}"


def _lines(file: BinaryIO, name: str, newline: str | None) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers from 1. Form feeds and U+2028 end no line, unlike in `str.splitlines`.

    Raises UserError at the first line that is not UTF-8.
    """
    # The decoder reads ahead and cannot say which line is wrong, so each line is checked after it was read.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    try:
        for number, line in enumerate(text, 1):
            try:
                line.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{name}, line {number}: not UTF-8 text at character {error.start + 1}") from None
            yield number, line
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}") from None
    text.detach()  # otherwise the file is closed with it
