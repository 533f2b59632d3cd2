"""Files and directories that exist whole or not at all, also after a crash or on a full disk."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.utils.regular_files import read_regular


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` on success, delete it on failure.

    Content and name are flushed to the disk: without that a power cut can leave an empty file. The temporary name is
    hidden and ends in .tmp: readers of a directory of data files skip it.
    """
    partial = path.with_name(f".{path.name}.tmp")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that readers see its old or its new content."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Read a file of `write_json`. Raises UserError, with `fix` at its end, if it holds something else."""
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {fix}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: {fix}")
    return content


def append_line(path: Path, text: str) -> None:
    """Append a line to a file. Raises OSError if it cannot be written; no part of it is in the file then."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        data = text.encode() + b"\n"
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explain_disk_errors(path: Path, otherwise: str) -> Iterator[None]:
    """Turn an OSError while `path` is written into a UserError that ends with `otherwise`, the way to fix it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror or error}): {otherwise}") from None


def remove(path: Path) -> None:
    """Delete a directory. At no moment does half of it exist under its own name; a missing one is fine."""
    if path.exists():
        doomed = path.with_name(path.name + ".removed.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, flush the name, then delete what `target` was before.

    The caller has flushed the files of `source`. A crash between the two renames leaves no `target`: the old one is
    `TARGET.replaced.tmp` then.
    """
    doomed = target.with_name(target.name + ".replaced.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    if target.exists():
        target.rename(doomed)
    source.rename(target)
    flush(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)
