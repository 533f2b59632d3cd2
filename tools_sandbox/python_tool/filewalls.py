"""What a call sees of the file system: Python and the system's files to read, a private /tmp to write, no homes."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
from functools import cache
from itertools import islice
from pathlib import Path

from tools_sandbox.python_tool import linux

_TMP = "/tmp"  # noqa: S108 - hidden from calls, not used
_WORK = f"{_TMP}/work"
_HIDDEN = ("/run", "/dev/shm")  # noqa: S108
"""Folders of sockets and shared memory that a call sees empty (and may write to) instead of the machine's."""


def remember_paths() -> None:
    """Look up once what every call needs; processes forked from this one inherit it."""
    _homes()


def raise_walls(disk_mb: int) -> None:
    """Own, read-only view of the file system without homes; the working directory is in a private /tmp."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", linux.MS_REC | linux.MS_PRIVATE)
    linux.make_mounts_read_only()
    for folder in map(Path, (_TMP, *_HIDDEN)):
        if folder.is_dir() and not folder.is_symlink():
            _cover(folder, f"size={disk_mb}m,nr_inodes=16384,mode=0777")
    for folder in _homes():
        _cover(folder, "size=1m,nr_inodes=1024,mode=0755")
    quiet = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    try:
        linux.mount("proc", "/proc", quiet)
    except OSError:
        # Containers that mask parts of /proc forbid a new one; none at all is the other safe choice.
        linux.mount("tmpfs", "/proc", quiet, "mode=0555")
    # Not /tmp itself: where Python is installed below it, its folder is visible there.
    Path(_WORK).mkdir()
    Path(_WORK).chmod(0o777)  # the call may run as another user
    os.chdir(_WORK)


def _cover(target: Path, options: str) -> None:
    """Mount an empty tmpfs over a folder; what Python needs below it stays visible, and is reachable for every user."""
    kept = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in _python_paths() if target in path.parents]
    linux.mount("tmpfs", str(target), linux.MS_NOSUID | linux.MS_NODEV, options)
    for path, descriptor in kept:
        path.mkdir(parents=True)
        linux.bind(f"/proc/self/fd/{descriptor}", str(path))
        os.close(descriptor)


@cache
def _python_paths() -> tuple[Path, ...]:
    """The folders that Python loads from, without those inside another."""
    paths = {Path(os.path.realpath(path)) for path in (sys.prefix, sys.base_prefix, *sys.path) if Path(path).is_dir()}
    return tuple(path for path in sorted(paths) if paths.isdisjoint(path.parents))


@cache
def _homes() -> tuple[Path, ...]:
    """Folders with other people's business: the own user's home, and what is closed to others above Python itself."""
    homes = set[Path]()
    with contextlib.suppress(KeyError, OSError):  # a user without entry or home
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        # System users have homes such as /dev, which are not theirs.
        if home.stat().st_uid == os.getuid() and home != Path("/"):
            homes.add(Path(os.path.realpath(home)))
    for path in _python_paths():
        closed = (parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH)
        homes.update(islice(closed, 1))
    covered = {Path(folder) for folder in (_TMP, *_HIDDEN)}
    return tuple(home for home in sorted(homes) if (homes | covered).isdisjoint(home.parents) and home not in covered)
