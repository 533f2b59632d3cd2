"""The guard of an MCP server: it starts the server, and ends all that the server has started when one of them ends.

The kernel would end the server with its worker process, but not the server's own children: `npx`, `uvx` or a shell run
the server as a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tools_sandbox.utils import linux
from tools_sandbox.utils.process_tree import end_tree

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)

# -I keeps the variables PYTHON*, which are meant for the server, from this process.
_BOOT = """
import sys
package_parent, parent = sys.argv[1:3]
sys.path.insert(0, package_parent)
from tools_sandbox.mcp.guard import main
main(int(parent), sys.argv[3:])
"""


def guarded(command: str, *arguments: str) -> list[str]:
    """Return the command line of a guard for a server. SIGTERM, or the end of this process, ends them all."""
    package_parent = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-c", _BOOT, package_parent, str(os.getpid()), command, *arguments]


def main(parent: int, command: list[str]) -> None:
    """Run a command on the standard streams of this process until it ends, or until the parent does."""
    linux.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they wait for `sigwait`
    linux.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        return
    try:
        server = subprocess.Popen(command, preexec_fn=_enter_server)  # noqa: PLW1509  (this process has no threads)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # else neither side of the connection would see that the other has closed it
        os.dup2(nothing, stream)
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD and not _has_ended(server.pid):
        pass
    end_tree(server.pid)


def _has_ended(server_pid: int) -> bool:
    """Return whether the server has ended, and reap the orphans that have."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == server_pid:  # not reaped yet: until then its number belongs to no other process
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _enter_server() -> None:
    linux.die_with_parent(signal.SIGKILL)  # if the guard is killed, at least the server ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
