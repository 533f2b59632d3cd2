"""The walls between calls and this machine, and the levels that a configuration can require."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tools_sandbox.python_tool import cgroups, landlock


class Level(IntEnum):
    """Isolation levels from weak to strong. Each includes those before it; `PythonConfig.isolation` defines them."""

    LIMITS = 0
    PROCESS = 1
    CONTAINED = 2
    FULL = 3


_WITH_CORE_HANDLER = "a crash starts that of /proc/sys/kernel/core_pattern, since the hard limit RLIMIT_CORE is 0"


@dataclass(frozen=True, slots=True)
class Walls:
    """The walls that stand on this machine."""

    network: bool
    """Own network namespace without an interface, own IPC and host name. All calls share these."""
    processes: bool
    """Own PID namespace per call: a call sees and signals only itself, and ends as a whole."""
    files: bool
    """Own mount namespace per call: Python and the system's libraries, read-only, and a private /tmp; nothing else."""
    user_namespace: bool
    """Own user namespace per call, with one user and without capabilities."""
    own_uid: bool
    """Every call runs under a user id that neither the service nor another call has."""
    system_calls: bool
    """Seccomp filter: only calls for computing, files, processes and pipes; no sockets."""
    landlock: int
    """ABI version of Landlock; 0: none. It guards files; from 6 on, signals and abstract sockets stay inside too."""
    groups: tuple[str, ...]
    """Control group controllers that bound a call as a whole: "memory", "pids", "cpu"."""
    why_no_groups: str
    """Why controllers are missing."""
    no_core_handler: bool
    """A crash does not start the machine's core handler."""

    def counts_processes(self) -> bool:
        """Return whether RLIMIT_NPROC counts only the call's processes."""
        return self.user_namespace or self.own_uid

    def level(self) -> Level:
        """Return the strongest level of which every wall stands."""
        privilege = self.user_namespace or self.own_uid
        if self.network and self.processes and self.files and privilege and self.system_calls:
            return Level.FULL if self.groups == cgroups.CONTROLLERS else Level.CONTAINED
        return Level.PROCESS if self.system_calls and self.landlock else Level.LIMITS

    def report(self) -> list[str]:
        """Return one line per mechanism: its effect, or what is lost without it."""
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
            ("core handler", self.no_core_handler, "a crash starts none", _WITH_CORE_HANDLER),
            ("resource limits", True, "CPU, memory, file size, descriptors of each process", ""),
        ]
        return [f"{name}: {f'yes ({gives})' if stands else f'NO ({loss})'}" for name, stands, gives, loss in lines]

    def describe(self) -> str:
        """Return level and report in one line."""
        return f"level {self.level().name.lower()}; {'; '.join(self.report())}"

    def warning(self) -> str:
        """Return which protection of level `contained` is missing at a lower level, or ""."""
        if self.level() >= Level.CONTAINED:
            return ""
        if self.level() == Level.LIMITS:
            return "a call can read and do everything that the service's user can"
        seen = (
            "a call can see names, sizes and times of files, process numbers, the host name and the load of the machine"
        )
        if self.own_uid or self.landlock >= landlock.SIGNALS_ABI:
            return seen
        return f"{seen}, and signal any process of the service's user by its number (needs Linux 6.12)"

    def missing_for(self, level: Level) -> str:
        """Return the mechanisms that this machine lacks for a level, or ""."""
        if self.level() >= level:
            return ""
        return "; ".join(line for line in self.report() if ": NO" in line)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Resource limits of a worker; see `tools_sandbox.config.Limits`."""

    cpu_s: int
    memory_mib: int
    file_mib: int
    disk_mib: int
    processes: int
    open_files: int
