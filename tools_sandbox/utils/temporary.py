"""A temporary folder that does not outlive its process for long, even if the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class TemporaryFolder:
    """A folder that this process locks while it lives. Creating one removes the folders of killed processes."""

    def __init__(self, prefix: str) -> None:
        """prefix: prefix of the folder's name, which must be unique to this use. Raises OSError."""
        for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # another user's, in use, or just removed
                lock = _locked(other)
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            # Between its creation and its lock, another process may take it for a leftover and remove it.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
