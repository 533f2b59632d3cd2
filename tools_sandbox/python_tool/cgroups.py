"""Control groups: the kernel's limits on the sum of what all processes of a call use.

Every slot (the service has one per call that runs or waits for its code) has one group per hierarchy. The group is
created when the slot is first used and reused by later calls: creating a group takes milliseconds, entering it
microseconds. Version 1 has one hierarchy per controller, version 2 one for all.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "tools_sandbox-"
_MIB = 1 << 20
_OVERHEAD_MIB = 64
"""Memory of the sandbox's own processes of a call, which are in its group too."""
_OVERHEAD_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Groups:
    """The control groups of this zygote."""

    version: int
    folders: dict[str, int]
    """Open descriptor of our folder by the controllers of its hierarchy ("memory", or "memory pids cpu")."""
    parents: dict[str, int]
    """Open descriptor of the folder above it, by the same keys."""
    name: str

    @property
    def controllers(self) -> tuple[str, ...]:
        """Names of the controllers that the held groups enforce."""
        return tuple(name for name in CONTROLLERS if any(name in held.split() for held in self.folders))

    def open_slot(self, slot: int, memory_mib: int, processes: int) -> None:
        """Create the groups of a slot if needed and set their limits. Raises OSError for limits the kernel rejects."""
        for held, folder in self.folders.items():
            with suppress(FileExistsError):
                os.mkdir(str(slot), dir_fd=folder)
            # Every time, since the creator of a group may have failed or been killed before it set the limits.
            self._limit(held, folder, slot, memory_mib + _OVERHEAD_MIB, processes + _OVERHEAD_PROCESSES)

    def _limit(self, held: str, folder: int, slot: int, memory_mib: int, processes: int) -> None:
        memory = str(memory_mib * _MIB)
        if "memory" in held and self.version == 1:
            _write(folder, f"{slot}/memory.limit_in_bytes", memory)
            with suppress(OSError):  # a kernel without swap accounting
                _write(folder, f"{slot}/memory.memsw.limit_in_bytes", memory)
        elif "memory" in held:
            _write(folder, f"{slot}/memory.max", memory)
            with suppress(OSError):
                _write(folder, f"{slot}/memory.swap.max", "0")
        if "pids" in held:
            _write(folder, f"{slot}/pids.max", str(processes))

    def enter(self, slot: int) -> None:
        """Move this process into the group of a slot. Its children are born there."""
        # Moving a whole process takes a lock for which the kernel waits milliseconds. Its only thread can move itself
        # without the lock. In version 2 a thread cannot move to another group alone.
        file = "tasks" if self.version == 1 else "cgroup.procs"
        for folder in self.folders.values():
            _write(folder, f"{slot}/{file}", "0")

    def memory_kills(self, slot: int) -> int:
        """Return how many processes of a slot the kernel has killed so far because of the memory limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for held, folder in self.folders.items():
            if "memory" in held:
                lines = (line.split() for line in _read(folder, f"{slot}/{name}").splitlines())
                return next((int(line[1]) for line in lines if line[0] == "oom_kill"), 0)
        return 0

    def cpu_s(self, slot: int) -> float | None:
        """Return the CPU time of all processes of a slot so far, including ended ones. None: it is not counted."""
        for held, folder in self.folders.items():
            if self.version == 1 and "cpuacct" in held.split():
                return int(_read(folder, f"{slot}/cpuacct.usage")) / 1e9
            if self.version == 2 and "cpu" in held.split():
                return int(_read(folder, f"{slot}/cpu.stat").split()[1]) / 1e6  # the first line is "usage_usec N"
        return None

    def remove(self) -> None:
        """Remove all groups. Their processes have ended or are about to end."""
        for held, folder in self.folders.items():
            _remove_tree(self.name, self.parents[held], folder)
            os.close(folder)


def find() -> tuple[Groups | None, str]:
    """Return groups for this process to use, or None, and why controllers are missing."""
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    reasons = []
    for version, wanted in ((1, _first_version()), (2, _second_version())):
        folders: dict[str, int] = {}
        parents: dict[str, int] = {}
        for held, path in wanted.items():
            try:
                parents[held] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # One zygote at a time: none may find the group of another that is about to lock it.
                fcntl.flock(parents[held], fcntl.LOCK_EX)
                try:
                    _remove_stale(parents[held])
                    folders[held] = _make_folder(version, held, parents[held], name)
                finally:
                    fcntl.flock(parents[held], fcntl.LOCK_UN)
            except OSError as error:
                reasons.append(f"{held} in {path}: {error.strerror}")
        if folders:
            return Groups(version, folders, parents, name), "; ".join(reasons)
    return None, "; ".join(reasons) or "no control groups are mounted"


def _make_folder(version: int, held: str, parent: int, name: str) -> int:
    if version == 2:
        _write(parent, "cgroup.subtree_control", " ".join(f"+{controller}" for controller in held.split()))
    os.mkdir(name, dir_fd=parent)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        _set_up(version, held, folder)
    except OSError:
        os.close(folder)
        os.rmdir(name, dir_fd=parent)
        raise
    return folder


def _set_up(version: int, held: str, folder: int) -> None:
    # Held while this zygote or one of its calls lives: see `_remove_stale`.
    fcntl.flock(folder, fcntl.LOCK_SH)
    if version == 2:
        _write(folder, "cgroup.subtree_control", " ".join(f"+{controller}" for controller in held.split()))
    if "cpu" in held.split():
        # All calls together get the weight of one process per CPU; by default they would get that of one process.
        cpus = len(os.sched_getaffinity(0))
        name, weight = ("cpu.shares", 1024 * cpus) if version == 1 else ("cpu.weight", min(10_000, 100 * cpus))
        _write(folder, name, str(weight))


def _first_version() -> dict[str, Path]:
    """Return the group of this process by controllers."""
    found: dict[str, Path] = {}
    own = {tuple(names.split(",")): path for names, path in _own_groups()}
    for mount_point, root, kind, options in _mounts():
        names = [name for name in (*CONTROLLERS, "cpuacct") if name in options]
        if kind == "cgroup" and names:
            paths = (path for controllers, path in own.items() if names[0] in controllers)
            for path in paths:
                inside = os.path.relpath(path, root)
                found[" ".join(names)] = Path(mount_point) / ("" if inside.startswith("..") else inside)
    return found


def _second_version() -> dict[str, Path]:
    for mount_point, root, kind, _ in _mounts():
        own = next((path for names, path in _own_groups() if not names), None)
        if kind == "cgroup2" and own is not None:
            inside = os.path.relpath(own, root)
            folder = Path(mount_point) / ("" if inside.startswith("..") else inside)
            with suppress(OSError):
                offered = (folder / "cgroup.controllers").read_text("ascii").split()
                held = " ".join(name for name in CONTROLLERS if name in offered)
                return {held: folder} if held else {}
    return {}


def _own_groups() -> list[tuple[str, str]]:
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return [(names, path) for _, names, path in (line.split(":", 2) for line in lines)]
    return []


def _mounts() -> list[tuple[str, str, str, list[str]]]:
    """Return mount point, root in the file system, type and options of every mount."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, mount_point, *_ = before.split()
        kind, _, options = after.split(" ", 2)
        mounts.append((mount_point, root, kind, options.split(",")))
    return mounts


def _remove_stale(parent: int) -> None:
    """Remove the groups of killed zygotes: those that no process has locked, in any container."""
    for name in os.listdir(parent):
        if name.startswith(_PREFIX):
            with suppress(OSError):
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_tree(name, parent, folder)
                finally:
                    os.close(folder)


def _remove_tree(name: str, parent: int, folder: int) -> None:
    deadline = time.monotonic() + 1.0
    while True:
        # A group becomes removable shortly after its last process has ended.
        for slot in os.listdir(folder):
            if slot.isdecimal():
                with suppress(OSError):
                    os.rmdir(slot, dir_fd=folder)
        try:
            os.rmdir(name, dir_fd=parent)
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _write(folder: int, name: str, text: str) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def _read(folder: int, name: str) -> str:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, 4096).decode("ascii")
    finally:
        os.close(descriptor)
