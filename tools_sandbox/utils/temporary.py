"""Temporary folders that do not outlive a killed process for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class TemporaryFolder:
    """A folder that this process locks while it lives. Creating one removes the folders of killed processes.

    Args:
        prefix: prefix of the folder's name, unique to this use.
    """

    def __init__(self, prefix: str) -> None:
        for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):  # another user's, in use, or just removed
                lock = _locked(other)
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        # It gets the name that other processes look for only when it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._lock: int | None = _locked(made)
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
