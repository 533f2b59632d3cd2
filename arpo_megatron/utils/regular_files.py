"""Reads of files that another person may have put into a run directory."""

import os
import stat
from pathlib import Path


def read_regular(path: Path, offset: int = 0) -> bytes:
    """Return the content of a regular file from `offset` on.

    Raises OSError for anything else: a read of a pipe would wait for its writer, a read of a device may never end.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        file.seek(offset)
        return file.read()
