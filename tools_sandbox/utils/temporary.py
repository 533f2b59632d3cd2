"""A folder that is gone with its process, also with one that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class TemporaryFolder:
    """A folder of this process, locked as long as it lives. Making one removes those whose process was killed."""

    def __init__(self, prefix: str) -> None:
        """prefix: of its name, which nothing else in the temporary directory has. OSError: it cannot be made."""
        for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # another user's, in use, or just gone
                lock = _locked(other)
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            # Between being made and being locked it may be taken for one that is left over.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove it; once more does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock. OSError: another process does, or there is no such folder of ours."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
