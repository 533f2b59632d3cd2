"""Resident memory of a process, read from /proc."""

from pathlib import Path


def resident(pid: int | str = "self") -> int:
    """Return the resident memory of a process in bytes."""
    return _status("VmRSS", pid)


def highest(pid: int | str = "self") -> int:
    """Return the peak of the resident bytes since `reset`."""
    return _status("VmHWM", pid)


def reset(pid: int | str = "self") -> None:
    """Start a new measurement of the peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(field: str, pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
