"""What separates calls on this machine, by mechanism and in sum: the levels a configuration can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tools_sandbox.python_tool import cgroups, landlock


class Level(IntEnum):
    """From weak to strong; each includes those before it. `PythonConfig.isolation` says what each takes."""

    LIMITS = 0
    PROCESS = 1
    CONTAINED = 2
    FULL = 3


@dataclass(frozen=True, slots=True)
class Walls:
    """The walls that stand on this machine."""

    network: bool
    """Own network namespace without any interface, own IPC and host name; shared by the calls, not with the machine."""
    processes: bool
    """Own PID namespace a call: it sees and signals only itself, and ends as a whole."""
    files: bool
    """Own mount namespace a call: Python and the system's libraries, read-only, and a private /tmp; nothing else."""
    user_namespace: bool
    """Own user namespace a call, with one user in it and no capability in or out of it."""
    own_uid: bool
    """Every call runs under a user id that is neither the service's nor another call's."""
    system_calls: bool
    """A seccomp filter: only calls for computing, files, processes and pipes; no sockets."""
    landlock: int
    """Version of Landlock, 0: none. Files as above; from 6 on no signal and no abstract socket leaves the call."""
    groups: tuple[str, ...]
    """Controllers of control groups that bound a call as a whole: "memory", "pids", "cpu"."""
    why_no_groups: str
    """What stood in the way of the controllers that are missing."""

    def counts_processes(self) -> bool:
        """Whether RLIMIT_NPROC counts the call's processes alone."""
        return self.user_namespace or self.own_uid

    def level(self) -> Level:
        """The strongest level whose every wall stands."""
        privilege = self.user_namespace or self.own_uid
        if self.network and self.processes and self.files and privilege and self.system_calls:
            return Level.FULL if self.groups == cgroups.CONTROLLERS else Level.CONTAINED
        return Level.PROCESS if self.system_calls and self.landlock else Level.LIMITS

    def report(self) -> list[str]:
        """One line a mechanism: what it gives, or what is lost without it."""
        users = [
            name for name, stands in (("own user id", self.own_uid), ("user namespace", self.user_namespace)) if stands
        ]
        signals = "files, signals, abstract sockets" if self.landlock >= landlock.SIGNALS_ABI else "files, NOT signals"
        counted = self.counts_processes() or "pids" in self.groups
        missing = [name for name in cgroups.CONTROLLERS if name not in self.groups]
        lines = [
            ("network namespace", self.network, "no interface", "sockets are left to the system call filter"),
            ("PID namespace", self.processes, "a call sees only itself", "a call can see other processes"),
            ("mount namespace", self.files, "a call sees Python and a private /tmp", "files are left to Landlock"),
            ("privilege", bool(users), ", ".join([*users, "no capabilities"]), "the service's user, no capabilities"),
            ("system call filter", self.system_calls, "seccomp", "every system call, sockets too"),
            ("Landlock", bool(self.landlock), f"version {self.landlock}: {signals}", "not in this kernel"),
            (
                "control groups",
                not missing,
                ", ".join(self.groups),
                f"{' and '.join(missing)} of a call as a whole: watched, not enforced ({self.why_no_groups})",
            ),
            ("process count", counted, "bounded for each call", "looked at 20 times a second, no bound of its own"),
            ("resource limits", True, "CPU, memory, file size, descriptors of each process", ""),
        ]
        return [f"{name}: {f'yes ({gives})' if stands else f'NO ({loss})'}" for name, stands, gives, loss in lines]

    def describe(self) -> str:
        """All of it in one line."""
        return f"level {self.level().name.lower()}; {'; '.join(self.report())}"

    def missing_for(self, level: Level) -> str:
        """What keeps this machine below a level, in a few words; empty if nothing does."""
        if self.level() >= level:
            return ""
        return "; ".join(line for line in self.report() if ": NO" in line)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Resource limits of a worker; see `tools_sandbox.config.Limits` for units."""

    cpu_s: int
    memory_mb: int
    file_mb: int
    disk_mb: int
    processes: int
    open_files: int
