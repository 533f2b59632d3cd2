"""The service's side of the python tool: starts the zygote, sends it calls, starts it again should it die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.walls import Level, Walls, WorkerLimits
from tools_sandbox.python_tool.wire import PLACE, THREAD_VARIABLES, Outcome, Request

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 120.0
_SEND_TIMEOUT_S = 2.0
"""Handing a call to the zygote takes microseconds; one that cannot take it for so long is replaced."""
_SCARCE = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""Errors of the hand-over for want of something that all processes of the service's user share, and that comes back:
descriptors in flight, buffers."""
_SCARCE_S = 5.0
_OVERTIME_S = 10.0
"""A supervisor keeps its call's time itself; one that is this late is broken."""

_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""pandas loads pyarrow where it is installed, which would start a thread that no forked process has."""

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
        # The lowest free place is taken, so there are never more than there were calls at a time.
        self._free_places: list[int] = []
        self._places = 0
        self.walls: Walls | None = None

    def start(self) -> None:
        """Start the zygote and wait until it is ready. SandboxBroken: it cannot start as configured; says why."""
        try:
            ready = json.loads(self._spawn() or b'{"error": "it ended at its start"}')
        except OSError as error:  # TimeoutError is one
            ready = {"error": f"cannot start {sys.executable}: {error}"}
        if "error" in ready:
            self.close()
            raise SandboxBroken(f"python tool: {ready['error']}")
        ready["walls"]["groups"] = tuple(ready["walls"]["groups"])
        self.walls = walls = Walls(**ready["walls"])
        wanted = Level[self._config.isolation.upper()]
        if missing := walls.missing_for(wanted):
            self.close()
            reached = walls.level().name.lower()
            raise SandboxBroken(
                f"python tool: isolation {self._config.isolation!r} is asked for, this machine reaches {reached!r}: "
                f"{missing}. To serve with less, set python.isolation to {reached!r}"
            )
        log.info(
            "python isolation: level %s (at least %s is asked for)", walls.level().name.lower(), wanted.name.lower()
        )
        for line in walls.report():
            log.info("python isolation: %s", line)
        if ready["threads"] > 1:
            log.warning("python.preload: %d threads run in the process that calls are forked from", ready["threads"])

    def _spawn(self) -> bytes:
        """Start the zygote; its first line, empty if it ended before that."""
        self._root = root = Path(tempfile.mkdtemp(prefix="tools_sandbox-"))
        # A call's own user passes through it to its working directory.
        root.chmod(0o711)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (theirs.fileno(), str(root), list(self._config.preload), asdict(self._worker_limits))
        boot = json.dumps((str(Path(__file__).resolve().parents[2]), arguments))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**dict.fromkeys(THREAD_VARIABLES, "1"), **_ONE_THREAD},
                cwd="/",
                # Ctrl-C at a terminal reaches the service alone, which then ends the zygote.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._control.settimeout(_START_TIMEOUT_S)
        message = self._control.recv(1 << 16)
        self._control.settimeout(_SEND_TIMEOUT_S)
        return message

    async def run(self, code: str, timeout_s: float, *, state: bytes = b"", keep_state: bool = False) -> Outcome:
        """Run code in a fresh process; at most timeout_s seconds of wall-clock time, the configured limit if lower.

        state: what an earlier outcome carried; the code begins with it. keep_state: let the outcome carry one.
        Raises SandboxBroken if the sandbox failed twice. If the awaiting task is cancelled, so is the code.
        """
        limits = self._limits
        request = Request(
            code=code,
            time_s=min(timeout_s, limits.time_s),
            output_chars=limits.output_chars,
            output_mb=limits.output_mb,
            limits=self._worker_limits,
            state_mb=limits.state_mb if keep_state else 0,
            state=state,
        )
        try:
            return await self._attempt(request)
        except SandboxBroken as error:
            log.warning("python tool: %s; trying once more", error)
            return await self._attempt(request)

    @contextlib.contextmanager
    def _place(self) -> Iterator[int]:
        if not self._free_places:
            heapq.heappush(self._free_places, self._places)
            self._places += 1
        place = heapq.heappop(self._free_places)
        try:
            yield place
        finally:
            heapq.heappush(self._free_places, place)

    async def _attempt(self, request: Request) -> Outcome:
        ours, theirs = socket.socketpair()
        with ours, theirs, self._place() as place:
            ours.setblocking(False)
            await self._send_to_zygote(theirs, place)
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

    async def _send_to_zygote(self, connection: socket.socket, place: int) -> None:
        restarts, give_up = 0, time.monotonic() + _SCARCE_S
        while restarts < 2:
            control = self._control
            if control is None:
                raise SandboxBroken("the service is shutting down")
            try:
                socket.send_fds(control, [PLACE.pack(place)], [connection.fileno()])
                return
            except OSError as error:
                if error.errno in _SCARCE:  # says nothing about the zygote, which may have a hundred calls running
                    if time.monotonic() > give_up:
                        raise SandboxBroken(f"a call could not be handed over for {_SCARCE_S:g} s: {error}") from error
                    await asyncio.sleep(0.02)
                    continue
                log.warning("python tool: the zygote is gone (%s), starting another", error)
                await self._start_again(control)
                restarts += 1
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
