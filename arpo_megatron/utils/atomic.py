"""Directories that are whole or absent, and what it takes that a power cut does not undo them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arpo_megatron.errors import UserError


def flush(path: Path) -> None:
    """The content of a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def written(path: Path, otherwise: str) -> Iterator[None]:
    """`path` is written inside. An OSError becomes a UserError: what, why, and `otherwise`, how to mend it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror or error}): {otherwise}") from None


def remove(path: Path) -> None:
    """Delete a directory; at no moment is there half of it under its own name. Nothing happens where it is missing."""
    if path.exists():
        doomed = path.with_name(path.name + ".removed.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source`, whose files are flushed, to `target`, in the place of what may be there, and flush the name."""
    doomed = target.with_name(target.name + ".replaced.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    if target.exists():
        target.rename(doomed)
    source.rename(target)
    flush(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)
