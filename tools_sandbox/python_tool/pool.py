"""The service's side of the python tool: starts the zygote, sends it calls, starts it again should it die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.isolation import Isolation, WorkerLimits
from tools_sandbox.python_tool.wire import THREAD_VARIABLES, Outcome, Request

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 120.0
_SEND_TIMEOUT_S = 2.0
"""Handing a call to the zygote takes microseconds; one that cannot take it for so long is replaced."""
_OVERTIME_S = 10.0
"""A supervisor keeps its call's time itself; one that is this late is broken."""

# -I keeps the working directory and PYTHON* variables out; the package's folder leaves the path before any call.
_BOOT = """
import json, sys
package_parent, arguments = json.loads(sys.argv[1])
sys.path.insert(0, package_parent)
from tools_sandbox.python_tool.zygote import main
sys.path.remove(package_parent)
main(*arguments)
"""


class SandboxBroken(RuntimeError):  # noqa: N818 - a state, like SandboxUnavailable
    """The sandbox itself failed; the foreign code is not to blame."""


class PythonPool:
    """Runs code in processes forked from one zygote. Belongs to one event loop once calls are made."""

    def __init__(self, config: PythonConfig, limits: Limits) -> None:
        self._config = config
        self._limits = limits
        self._worker_limits = WorkerLimits(
            limits.cpu_s, limits.memory_mb, limits.file_mb, limits.disk_mb, limits.processes, limits.open_files
        )
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Path | None = None
        self._restart = asyncio.Lock()
        self.walls: Isolation | None = None

    def start(self) -> None:
        """Start the zygote and wait until it is ready. SandboxBroken: it cannot start as configured; says why."""
        try:
            ready = json.loads(self._spawn() or b'{"error": "it ended at its start"}')
        except OSError as error:  # TimeoutError is one
            ready = {"error": f"cannot start {sys.executable}: {error}"}
        if "error" in ready:
            self.close()
            raise SandboxBroken(f"python tool: {ready['error']}")
        self.walls = Isolation(**ready["walls"])
        log.info("isolation of the python tool: %s", ready["summary"])
        if self._config.isolation == "require" and not self.walls.complete():
            self.close()
            raise SandboxBroken(f"python tool: isolation is required; {ready['summary']}")

    def _spawn(self) -> bytes:
        """Start the zygote; its first line, empty if it ended before that."""
        self._root = root = Path(tempfile.mkdtemp(prefix="tools_sandbox-"))
        # A call's own user passes through it to its working directory.
        root.chmod(0o711)
        self._control, theirs = socket.socketpair()
        arguments = (theirs.fileno(), self._config.isolation, str(root), list(self._config.preload))
        boot = json.dumps((str(Path(__file__).resolve().parents[2]), arguments))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict.fromkeys(THREAD_VARIABLES, "1"),
                cwd="/",
                # Ctrl-C at a terminal reaches the service alone, which then ends the zygote.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._control.settimeout(_START_TIMEOUT_S)
        line: bytes = self._control.makefile("rb", buffering=0).readline()
        self._control.settimeout(_SEND_TIMEOUT_S)
        return line

    async def run(self, code: str, timeout_s: float) -> Outcome:
        """Run code in a fresh process; at most timeout_s seconds of wall-clock time, the configured limit if lower.

        Raises SandboxBroken if the sandbox failed twice. If the awaiting task is cancelled, so is the code.
        """
        request = Request(code, min(timeout_s, self._limits.time_s), self._limits.output_chars, self._worker_limits)
        try:
            return await self._attempt(request)
        except SandboxBroken as error:
            log.warning("python tool: %s; trying once more", error)
            return await self._attempt(request)

    async def _attempt(self, request: Request) -> Outcome:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            await self._send_to_zygote(theirs)
            theirs.close()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                writer.write(request.encode())
                async with asyncio.timeout(request.time_s + _OVERTIME_S):
                    outcome = Outcome.decode(await reader.read(-1))
            except asyncio.CancelledError:
                await _end_call(reader, writer)
                raise
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                raise SandboxBroken(f"no outcome: {error!r}") from error
            finally:
                # For the supervisor this is the end of the call, whatever state it is in.
                writer.transport.abort()
        if outcome.status == "broken":
            raise SandboxBroken(outcome.text)
        return outcome

    async def _send_to_zygote(self, connection: socket.socket) -> None:
        for _ in range(2):
            control = self._control
            if control is None:
                raise SandboxBroken("the service is shutting down")
            try:
                socket.send_fds(control, [b"c"], [connection.fileno()])
                return
            except OSError as error:
                log.warning("python tool: the zygote is gone (%s), starting another", error)
                await self._start_again(control)
        raise SandboxBroken("the zygote does not stay alive")

    async def _start_again(self, dead: socket.socket) -> None:
        async with self._restart:
            if self._control is dead:  # else another call already did it
                self.close()
                await asyncio.to_thread(self.start)

    def close(self) -> None:
        """End the zygote and every running call."""
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(timeout=1.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._root is not None:
            # Only a zygote that was killed leaves it: it removes the folder itself, also if the service was killed.
            shutil.rmtree(self._root, ignore_errors=True)


async def _end_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Tell a supervisor to end its call, and wait (1 s at most) until its processes are gone."""
    with contextlib.suppress(OSError):  # a TimeoutError too
        writer.write_eof()
        async with asyncio.timeout(1.0):
            await reader.read(-1)
