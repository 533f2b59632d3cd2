"""The file system that a call sees: Python, the system's libraries and programs, and a private /tmp. Nothing else.

The zygote builds this view once and makes it its root. Each call adds its own `/tmp` and `/proc`. Without mount
namespaces, Landlock rules allow the same folders.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from functools import cache
from pathlib import Path

from tools_sandbox.python_tool import landlock
from tools_sandbox.utils import linux

_SYSTEM_FOLDERS = ("/lib", "/lib32", "/lib64", "/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin")
_SYSTEM_DATA = ("/usr/share/zoneinfo",)
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_ZERO = "/dev/zero"
"""Shown as /dev/full, which reads as zeros too. A mapping of the real one would be shared memory (see `seccomp`)."""
_TMP = "/tmp"  # noqa: S108 - private to the call
_WORK = f"{_TMP}/work"
INSIDE_ID = 1000
"""User and group id of a call inside its user namespace."""


@cache
def python_paths() -> tuple[Path, ...]:
    """Return the folders that Python and its packages are loaded from, without nested ones.

    Calls do not see other entries of sys.path, such as an editable install or the service's working directory.
    """
    folders = {Path(os.path.realpath(path)) for path in (sys.prefix, sys.base_prefix)}
    packages = (path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages"))
    folders.update(Path(os.path.realpath(path)) for path in packages if path.is_dir())
    return tuple(path for path in sorted(folders) if folders.isdisjoint(path.parents))


def forget_other_paths() -> None:
    """Remove from sys.path the folders that calls do not see."""
    seen = python_paths()
    real = {path: Path(os.path.realpath(path)) for path in sys.path}
    sys.path[:] = [path for path, folder in real.items() if any(folder.is_relative_to(root) for root in seen)]


def build_root(folder: str) -> None:
    """Build the view in an empty folder and make it the root of this process's mount namespace."""
    linux.mount("", "/", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", folder, linux.MS_NOSUID | linux.MS_NODEV, "size=16m,mode=0755")
    root = Path(folder)
    for name in ("etc", "dev", "proc", "run", "var", "sys", "tmp"):
        (root / name).mkdir()
    for path in map(Path, (*_SYSTEM_FOLDERS, *_SYSTEM_DATA)):
        if path.is_symlink():
            _inside(root, path).symlink_to(path.readlink())
        elif path.is_dir():
            _show(root, path)
    for path in map(Path, _SYSTEM_FILES):
        if path.is_file():
            shutil.copyfile(path, _inside(root, path))
    for device in (*_DEVICES, _ZERO):
        (root / device.lstrip("/")).touch()
        linux.bind("/dev/full" if device == _ZERO else device, str(root / device.lstrip("/")))
    (root / "dev/shm").symlink_to(_TMP)
    (root / "var/tmp").symlink_to(_TMP)
    (root / "etc/passwd").write_text(f"call:x:{INSIDE_ID}:{INSIDE_ID}::{_TMP}:/bin/sh\n", "ascii")
    (root / "etc/group").write_text(f"call:x:{INSIDE_ID}:\n", "ascii")
    for path in python_paths():
        if not _inside(root, path).exists():  # else Python is in a system folder
            _show(root, path)
    linux.make_mounts_read_only(folder)
    # The machine's /proc, for the sandbox's own processes. Every call covers it with its own.
    linux.bind("/proc", str(root / "proc"))
    linux.change_root(folder)


def _inside(root: Path, path: Path) -> Path:
    """Return the path in the view of a path of the machine, after creating its parent folder."""
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _show(root: Path, path: Path) -> None:
    target = _inside(root, path)
    target.mkdir(exist_ok=True)
    linux.bind(str(path), str(target))


def enter_call(disk_mib: int) -> None:
    """Mount /tmp, with the working directory, and /proc in a call's mount namespace. /proc shows only its processes."""
    below = [path for path in python_paths() if path.is_relative_to(_TMP)]
    kept = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in below]
    linux.mount("tmpfs", _TMP, linux.MS_NOSUID | linux.MS_NODEV, f"size={disk_mib}m,nr_inodes=16384,mode=0777")
    for path, descriptor in kept:
        path.mkdir(parents=True)
        linux.bind(f"/proc/self/fd/{descriptor}", str(path))
        os.close(descriptor)
    quiet = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    try:
        linux.mount("proc", "/proc", quiet, "subset=pid")
    except OSError:
        # Containers that mask parts of /proc forbid a new one. No /proc at all is the other safe choice.
        linux.mount("tmpfs", "/proc", quiet, "mode=0555")
    # A folder below /tmp: if Python is installed below /tmp, its folder is visible there.
    Path(_WORK).mkdir()
    Path(_WORK).chmod(0o777)  # the call may run as another user
    os.chdir(_WORK)


def rules_inside() -> list[tuple[str, int]]:
    """Return Landlock rules for a call with its own view: it may read everything in it and owns /tmp."""
    devices = [(device, landlock.WRITE_TO) for device in _DEVICES]
    return [("/", landlock.READ), (_TMP, landlock.ALL), *devices]


def rules_outside(folder: str) -> list[tuple[str, int]]:
    """Return Landlock rules for a call without a view: the same paths, and its own folder."""
    read = (*_SYSTEM_FOLDERS, *_SYSTEM_DATA, *_SYSTEM_FILES, *map(str, python_paths()))
    devices = [(device, landlock.WRITE_TO) for device in _DEVICES]
    return [*((path, landlock.READ) for path in read), *devices, (folder, landlock.ALL)]


def unreadable() -> str:
    """Return a folder of Python that this process cannot read, or "" if it can read all."""
    for folder in (Path(os.__file__).parent, *python_paths()):
        if not os.access(folder, os.R_OK | os.X_OK) or not stat.S_ISDIR(folder.stat().st_mode):
            return str(folder)
    return ""
