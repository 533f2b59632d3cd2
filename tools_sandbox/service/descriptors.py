"""How many descriptors the service may open, and what for: enough are kept back for the calls that run."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from tools_sandbox.config import ConfigError, SandboxConfig

_MOST = 1 << 16
_OF_THE_SERVICE = 64
"""Standard streams, the event loop, the cache's files, and what is open for a moment only."""
_OF_A_PYTHON_CALL = 4
"""A pair of sockets, and the state of a session; a call that waits for its code has the pair."""
_OF_A_PROCESS = 4
"""A worker or an MCP server, and what starting one takes."""
_FEWEST_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that keep the service within its descriptors."""

    connections: int
    """Callers that may be connected at a time."""
    calls: int
    """Calls that may run or wait at a time, so that whoever is told 429 still has a connection to hear it on."""

    def waiting(self, tools: int, places: int, wanted: int) -> int:
        """Calls of one tool that may wait: as many as wanted, or its share. places: those of one tool that run."""
        return min(wanted, max(self.calls // tools - places, 1))


def raise_limit() -> int:
    """Open descriptors that this process may have, after asking the kernel for all that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def share_out(limit: int, config: SandboxConfig) -> Budget:
    """What a limit on open descriptors suffices for. ConfigError: not for the configured calls."""
    processes = config.workers + len(config.mcp) + 1
    calls = config.max_concurrency + config.python.ahead
    kept = _OF_THE_SERVICE + _OF_A_PYTHON_CALL * calls + _OF_A_PROCESS * processes
    connections = limit - kept
    if connections < _FEWEST_CONNECTIONS:
        raise ConfigError(
            f"max_concurrency: {config.max_concurrency} calls at a time need {kept + _FEWEST_CONNECTIONS} open files, "
            f"and this process may have {limit}: raise its limit (ulimit -Hn), or lower max_concurrency"
        )
    return Budget(connections, 3 * connections // 4)
