"""Temporary folders that do not outlive a killed process for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_UNLOCKED_S = 60.0
"""A hidden folder that is younger may be about to be locked."""


class TemporaryFolder:
    """A folder that this process locks while it lives. Creating one removes the folders of killed processes.

    Args:
        prefix: prefix of the folder's name, unique to this use.
    """

    def __init__(self, prefix: str) -> None:
        _remove_old(prefix)
        # It gets the name that other processes look for only when it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        try:
            self._lock: int | None = _locked(made)
        except OSError:
            made.rmdir()
            raise
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_old(prefix: str) -> None:
    folder = Path(tempfile.gettempdir())
    for other in (*folder.glob(f"{prefix}*"), *folder.glob(f".{prefix}*")):
        with suppress(OSError):  # another user's, in use, or just removed
            if other.name.startswith(".") and time.time() - other.stat().st_mtime < _UNLOCKED_S:
                continue
            lock = _locked(other)
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
