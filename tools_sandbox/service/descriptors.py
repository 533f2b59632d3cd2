"""The budget of open files: the connections and calls that fit next to the files of running calls."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from tools_sandbox.config import ConfigError, ToolServiceConfig

_MAX_LIMIT = 1 << 16
_FOR_SERVICE = 64
"""Standard streams, the event loop, the files of the cache, and short-lived files."""
_FOR_PYTHON_CALL = 4
"""A pair of sockets, and the states of a session before and after. A process that waits for its code has the pair."""
_FOR_PROCESS = 4
"""A worker, including what its start takes."""
_MIN_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that keep the service within its limit of open files."""

    connections: int
    """Callers that may be connected at a time."""
    calls: int
    """Calls that may run or wait at a time. Fewer than `connections`, so that HTTP 429 still finds a connection."""

    def max_waiting(self, tools: int, slots: int, wanted: int) -> int:
        """Return how many calls of one tool may wait: `wanted`, or the tool's share. slots: its calls that may run."""
        return min(wanted, max(self.calls // tools - slots, 1))


def raise_limit() -> int:
    """Raise the soft limit of open files of this process as far as the kernel allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_LIMIT)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def plan_budget(limit: int, config: ToolServiceConfig) -> Budget:
    """Return the budget for a limit of open files. Raises ConfigError if `max_concurrency` calls do not fit."""
    processes = config.workers + len(config.mcp) + 1
    calls = config.max_concurrency + config.python.ahead
    reserved = _FOR_SERVICE + _FOR_PYTHON_CALL * calls + _FOR_PROCESS * processes
    connections = limit - reserved
    if connections < _MIN_CONNECTIONS:
        raise ConfigError(
            f"max_concurrency: {config.max_concurrency} calls at a time need {reserved + _MIN_CONNECTIONS} open files, "
            f"but this process may have {limit}: raise the limit (ulimit -Hn) or lower max_concurrency"
        )
    return Budget(connections, 3 * connections // 4)
