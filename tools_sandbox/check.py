"""A check of this machine for programs that will start the service."""

from typing import NamedTuple

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.walls import Level


class IsolationResult(NamedTuple):
    """The isolation of Python calls on this machine."""

    level: str
    """The level that the machine reaches, as in `PythonConfig.isolation`."""
    sufficient: bool
    """Whether it is at least the wanted one."""
    missing: str
    """The mechanisms that the machine lacks for the wanted level."""
    warning: str
    """The gaps below level `contained`: what calls can see or reach. Empty from that level on."""


def check_isolation(wanted: str) -> IsolationResult:
    """Start a Python worker and compare its isolation with the wanted level of `PythonConfig.isolation`."""
    pool = PythonPool(PythonConfig(preload=(), isolation="limits"), Limits())
    try:
        pool.start()
        walls = pool.walls
    finally:
        pool.close()
    if walls is None:
        raise AssertionError("a pool that has started knows its walls")
    level, least = walls.level(), Level[wanted.upper()]
    return IsolationResult(level.name.lower(), level >= least, walls.missing_for(least), walls.warning())
