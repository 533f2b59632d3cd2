"""Files of rows that users give, whatever is in them: JSON lines, JSON, CSV and parquet.

There is one way to be unreadable: a `UserError` that names the file, the line where it has lines, and what is wrong.
One line that is not JSON need not spoil a file: it is a row too, and whoever reads says what becomes of it.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from arpo_megatron.errors import UserError

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_BATCH_ROWS = 256


class BadRowError(ValueError):
    """Why a row is of no use to whoever reads it."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row as it stands in its file.

    Attributes:
        number: from 0; empty lines are none.
        where: file and place, as an error names them.
        found: what it holds, or why that cannot be read.
    """

    number: int
    where: str
    found: Any

    def value(self) -> Any:
        """What it holds. Raises BadRowError where that cannot be read."""
        if isinstance(self.found, BadRowError):
            raise self.found
        return self.found

    def needed(self) -> Any:
        """Likewise, where the file is of no use without it. Raises UserError."""
        if isinstance(self.found, BadRowError):
            raise self.refused(str(self.found))
        return self.found

    def refused(self, reason: str) -> UserError:
        """The error that names the row."""
        return UserError(f"{self.where}: {reason}")


def read_rows(
    path: Path, key: str = "", *, columns: Sequence[str] | None = None, content: bytes | None = None
) -> Iterator[FileRow]:
    """The rows of a file: of a table, of a JSON array, or else its lines, each of them JSON.

    Args:
        path: of the file; its suffix says what it is, and what none of `FORMATS` names is JSON lines.
        key: what stands before the path where it was given, e.g. "--train-data ".
        columns: those of a parquet file that are wanted, as far as it has them; None: all.
        content: of the file, where it was read already.

    Raises:
        UserError: no such file, or not what its suffix says.
    """
    with _opened(path, key, content) as file:
        match path.suffix:
            case ".parquet":
                yield from _parquet(file, f"{key}{path}", columns)
            case ".csv":
                yield from _csv(file, f"{key}{path}")
            case ".json":
                yield from _json(file, f"{key}{path}")
            case _:
                yield from _json_lines(file, f"{key}{path}")


def read_parquet_rows(path: Path, key: str = "", *, columns: Sequence[str] | None = None) -> Iterator[FileRow]:
    """As `read_rows`, of a parquet file under any name."""
    with _opened(path, key, None) as file:
        yield from _parquet(file, f"{key}{path}", columns)


def parquet_columns(path: Path, key: str = "") -> list[str]:
    """The names of a parquet file's columns. Raises UserError as `read_parquet_rows` does."""
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
    """A batch in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            # Where it has none of them every row is told with what it has instead.
            kept = None if columns is None else [each for each in columns if each in table.schema_arrow.names] or None
            for batch in table.iter_batches(_BATCH_ROWS, columns=kept):
                for row in batch.to_pylist():
                    yield FileRow(number, f"{name}, row {number} (from 0)", row)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise _no_parquet(name, error) from None


def _no_parquet(name: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{name}: not a readable parquet file: {reason}")


def _csv(file: BinaryIO, name: str) -> Iterator[FileRow]:
    line = 0

    def texts() -> Iterator[str]:
        nonlocal line
        for line, text in _lines(file, name, newline=""):  # noqa: B007  (named in errors)
            yield text

    try:  # csv itself says where a row ends
        for number, row in enumerate(csv.DictReader(texts())):
            yield FileRow(number, f"{name}, line {line}", row)
    except csv.Error as error:
        raise UserError(f"{name}, line {line}: not CSV: {error}") from None


def _json(file: BinaryIO, name: str) -> Iterator[FileRow]:
    """An array, or lines under the name of one, as some publish them."""
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
    """Its own line number counts from the beginning of what was parsed, which may be one line of many."""
    reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON: {reason}"


def _lines(file: BinaryIO, name: str, newline: str | None) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1. A form feed or U+2028 inside of text ends none, as for `str.splitlines`.

    Raises UserError at the first that is not UTF-8.
    """
    # Bytes that are none are let through at first: the decoder reads ahead and cannot say in which line they stand.
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
    text.detach()  # or the file would be closed with it
