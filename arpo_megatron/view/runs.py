"""The runs that a page shows, and what was read from their files."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import TRAINING, RunDirectory


def find_runs(paths: Sequence[Path]) -> dict[str, RunDirectory]:
    """Return run directories by a name that is unique among them.

    Args:
        paths: run directories, or directories that contain some.

    Raises:
        UserError: a path is neither.
    """
    found: list[Path] = []
    for path in paths:
        runs = [path] if _is_run(path) else sorted(each for each in path.glob("*") if _is_run(each))
        if not runs:
            raise UserError(f"{path} is not a run directory and contains none: no config.yaml in it or one level below")
        found += [run for run in runs if run.resolve() not in [other.resolve() for other in found]]
    names: dict[str, RunDirectory] = {}
    for run in found:
        name, number = run.resolve().name, 2
        while name in names:
            name, number = f"{run.resolve().name} ({number})", number + 1
        names[name] = RunDirectory(run)
    return names


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


@dataclass(slots=True)
class FileCache:
    """Keeps what was read from a file until the file changes."""

    _kept: dict[tuple[Path, str], tuple[tuple[int, int], Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def get(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """Return `read(path)`, from memory if size and time of the file are the same. Raises as `read` does."""
        try:
            stat = path.stat()
        except OSError:
            return read(path)
        stamp, key = (stat.st_mtime_ns, stat.st_size), (path, getattr(read, "__qualname__", repr(read)))
        with self._lock:
            kept = self._kept.get(key)
        if kept is None or kept[0] != stamp:
            kept = (stamp, read(path))
            with self._lock:
                self._kept[key] = kept
        return kept[1]


def is_training(run: RunDirectory) -> bool:
    """Whether a job that trains holds the run directory on this machine. A served run is held, too, but does not.

    The lock is looked up in /proc/locks: to try it would disturb a job that is about to start.
    """
    try:
        path = run.path / ".lock"
        lock, use = path.stat(), path.read_text(encoding="utf-8")
        held = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    return use == TRAINING and any(device in line.split() for line in held.splitlines())
