"""The rows of a file, or of a directory in one of the two layouts of Hugging Face datasets.

`save_to_disk` writes Arrow files and `state.json`, with a directory per split and `dataset_dict.json` if there are
several. A downloaded repository has files whose names contain the split: `data/train-00000-of-00002.parquet`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from arpo_megatron.errors import UserError
from arpo_megatron.utils.table_reader import FORMATS, FileRow, read_rows

_KEY = "data.path="
_SPLITS = ("train", "validation", "valid", "dev", "test")
_METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")


class DataReader(Protocol):
    """Reads the rows of `data.path`; a component of `data.reader` (entry-point group `arpo_megatron.data_readers`)."""

    def rows(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Yield the rows; columns are found or mapped as in other files. Raises UserError for an unusable file."""


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads Parquet, JSON lines, JSON, CSV, Arrow, and directories of Hugging Face datasets."""

    split: str = "train"
    """Split of a directory (`data.split`)."""

    def rows(self, path: Path) -> Iterator[FileRow]:
        """Yield the rows of all files, numbered from 0. Raises UserError for a missing or unreadable file."""
        number = 0
        for file in data_files(path, self.split):
            for row in read_rows(file, _KEY):
                yield replace(row, number=number)
                number += 1


def numbered(reader: DataReader | FileReader, path: Path) -> Iterator[FileRow]:
    """Yield the rows of a reader with their positions. Raises UserError if it fails."""
    if isinstance(reader, FileReader):
        yield from reader.rows(path)
        return
    number = 0
    try:
        for number, row in enumerate(reader.rows(path)):
            yield FileRow(number, f"{_KEY}{path}, row {number} (from 0)", row)
    except UserError:
        raise
    except Exception as error:  # the reader is the user's: anything can go wrong in it
        name = type(reader).__name__
        raise UserError(
            f"{_KEY}{path}: data.reader {name} failed at or after row {number} (from 0): {error!r}"
        ) from error


def data_files(path: Path, split: str) -> list[Path]:
    """Return the files of a data set in their order.

    Raises:
        UserError: there is nothing, or the directory has several data sets or another split.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{_KEY}{path}: no such file or directory")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in path.glob("*/state.json"))
        if split not in splits:
            raise UserError(f"{_KEY}{path}: no split {split!r}; set data.split to one of: {', '.join(splits)}")
        return data_files(path / split, split)
    if (path / "state.json").is_file():
        return _saved(path)
    return _downloaded(path, split)


def _saved(path: Path) -> list[Path]:
    """Return the Arrow files that the state of `save_to_disk` lists."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{_KEY}{path}: state.json is not that of a saved dataset: {error!r}") from None


def _downloaded(path: Path, split: str) -> list[Path]:
    """Return the files of the split in a downloaded repository, or all files if no name contains a split."""
    visible = (each for each in sorted(path.rglob("*")) if not _hidden(each.relative_to(path)))
    files = [each for each in visible if each.suffix in FORMATS and each.name not in _METADATA and each.is_file()]
    if not files:
        raise UserError(f"{_KEY}{path}: no file there ends in {', '.join(FORMATS)}")
    named = {name: [each for each in files if _of_split(each.relative_to(path), name)] for name in {*_SPLITS, split}}
    found = sorted(name for name, members in named.items() if members)
    if found and split not in found:
        raise UserError(f"{_KEY}{path}: no split {split!r}; set data.split to one of: {', '.join(found)}")
    chosen = named[split] or files
    if len(folders := sorted({each.parent.name for each in chosen})) > 1:
        raise UserError(f"{_KEY}{path} has several data sets: choose one of its directories {', '.join(folders)}")
    if len(suffixes := sorted({each.suffix for each in chosen})) > 1:
        raise UserError(f"{_KEY}{path} has {' and '.join(suffixes)} files: name one of them")
    return chosen


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _of_split(path: Path, split: str) -> bool:
    return re.search(rf"(^|[-_./]){re.escape(split)}([-_./]|$)", path.with_suffix("").as_posix()) is not None
