"""The service's side of the python tool: starts the zygote, sends it calls, starts it again should it die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import json
import logging
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.protocol import PLACE, THREAD_VARIABLES, Outcome, Request
from tools_sandbox.python_tool.walls import Level, Walls, WorkerLimits
from tools_sandbox.utils.temporary import TemporaryFolder

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 120.0
_SEND_TIMEOUT_S = 2.0
"""Handing a call to the zygote takes microseconds; one that cannot take it for so long is replaced."""
_SCARCE = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of the hand-over for want of something that calls, or all processes of a user or the machine, share, and that
comes back: descriptors, open and in flight; buffers."""
_SCARCE_S = 5.0
_LOOK_AGAIN_S = 0.02
_RESTART_S = 15.0
"""How long a call waits for a zygote in place of one that died; a machine that is out of processes or memory may
refuse one for a while."""
_LONGEST_PAUSE_S = 2.0
_OVERTIME_S = 10.0
"""A supervisor keeps its call's time itself; one that is this late is broken."""

_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""pandas loads pyarrow where it is installed, which would start a thread that no forked process has."""

# -I keeps the working directory and PYTHON* variables out; the package's folder leaves the path before any call.
# What a call can read in its /proc/self/cmdline says nothing of the machine: the rest comes over the control socket.
_BOOT = """
import json, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
package_parent, arguments = json.loads(control.recv(1 << 20))
sys.path.insert(0, package_parent)
from tools_sandbox.python_tool.zygote import main
sys.path.remove(package_parent)
main(control, *arguments)
"""


class SandboxBroken(RuntimeError):  # noqa: N818 - a state, like SandboxUnavailable
    """The sandbox itself failed; the foreign code is not to blame."""


class SandboxFull(RuntimeError):  # noqa: N818 - likewise
    """There is no room for a call now, and nothing of it has begun."""


class _Call(NamedTuple):
    """A call's connection to its supervisor, and the place it has."""

    connection: socket.socket
    place: int


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
        self._folder: TemporaryFolder | None = None
        self._closed = False
        self._restart = asyncio.Lock()
        self.restarts = 0
        """Zygotes that were started in place of one that had died."""
        # The lowest free place is taken, so there are never more than there were calls, also waiting ones, at a time.
        self._free_places: list[int] = []
        self._ready: list[_Call] = []
        self._filling: asyncio.Task[None] | None = None
        self._places = 0
        self.walls: Walls | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a zygote to send calls to."""
        return self._control is not None and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the zygote and wait until it is ready. SandboxBroken: it cannot start as configured; says why."""
        try:
            control, message = self._spawn()
        except OSError as error:  # TimeoutError is one
            self._end()
            raise SandboxBroken(f"python tool: cannot start {sys.executable}: {error}") from error
        try:
            self._take_walls(json.loads(message or b'{"error": "it ended at its start"}'))
        except SandboxBroken:
            control.close()
            self._end()
            raise
        self._control = control

    def _take_walls(self, ready: dict[str, Any]) -> None:
        """What the zygote said when it was ready. SandboxBroken: it is not, or its walls do not suffice."""
        if "error" in ready:
            raise SandboxBroken(f"python tool: {ready['error']}")
        ready["walls"]["groups"] = tuple(ready["walls"]["groups"])
        self.walls = walls = Walls(**ready["walls"])
        wanted, reached = Level[self._config.isolation.upper()], walls.level().name.lower()
        if missing := walls.missing_for(wanted):
            raise SandboxBroken(
                f"python tool: isolation {self._config.isolation!r} is asked for, this machine reaches {reached!r}: "
                f"{missing}. To serve with less, set python.isolation to {reached!r}"
            )
        log.info("python isolation: level %s (at least %s is asked for)", reached, wanted.name.lower())
        for line in walls.report():
            log.info("python isolation: %s", line)
        if ready["threads"] > 1:
            log.warning("python.preload: %d threads run in the process that calls are forked from", ready["threads"])

    def _spawn(self) -> tuple[socket.socket, bytes]:
        """Start the zygote; the control socket to it, and its first line, empty if it ended before that."""
        self._folder = TemporaryFolder("tools_sandbox-python-")
        root = self._folder.path
        # A call's own user passes through it to its working directory.
        root.chmod(0o711)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (str(root), list(self._config.preload), asdict(self._worker_limits))
        try:
            with theirs:
                control.send(json.dumps((str(Path(__file__).resolve().parents[2]), arguments)).encode())
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**dict.fromkeys(THREAD_VARIABLES, "1"), **_ONE_THREAD},
                    cwd="/",
                    # Ctrl-C at a terminal reaches the service alone, which then ends the zygote.
                    start_new_session=True,
                )
            control.settimeout(_START_TIMEOUT_S)
            message = control.recv(1 << 16)
        except BaseException:
            control.close()
            raise
        control.setblocking(False)
        return control, message

    async def run(self, code: str, timeout_s: float, *, state: bytes = b"", keep_state: bool = False) -> Outcome:
        """Run code in a fresh process; at most timeout_s seconds of wall-clock time, the configured limit if lower.

        state: what an earlier outcome carried; the code begins with it. keep_state: let the outcome carry one.
        Raises SandboxBroken if the sandbox failed twice; SandboxFull. If the awaiting task is cancelled, so is the
        code.
        """
        limits = self._limits
        request = Request(
            code=code,
            time_s=min(timeout_s, limits.time_s),
            output_chars=limits.output_chars,
            output_mb=limits.output_mb,
            state_mb=limits.state_mb if keep_state else 0,
            state=state,
        )
        try:
            return await self._attempt(request, self._taken() or await self._new_call())
        except SandboxBroken as error:
            log.warning("python tool: %s; trying once more", error)
            return await self._attempt(request, await self._new_call())

    async def _new_call(self) -> _Call:
        """Have the zygote fork a call, which waits for its request."""
        ours, theirs = await _connected_pair()
        if not self._free_places:
            heapq.heappush(self._free_places, self._places)
            self._places += 1
        place = heapq.heappop(self._free_places)
        with theirs:
            try:
                ours.setblocking(False)
                await self._send_to_zygote(theirs, place)
            except BaseException:
                self._over(_Call(ours, place))
                raise
        return _Call(ours, place)

    def _over(self, call: _Call) -> None:
        """For the supervisor this is the end of its call, whatever state that is in."""
        call.connection.close()
        heapq.heappush(self._free_places, call.place)

    def _taken(self) -> _Call | None:
        """A call that has been waiting, and one more is made ready in its place."""
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._fill())
        if not self.alive:
            self._forget_ready()  # before the next zygote comes, which removes what this one has left
        return self._ready.pop(0) if self._ready else None

    async def _fill(self) -> None:
        walls = self.walls
        hidden = walls is not None and walls.processes and walls.counts_processes()
        while hidden and len(self._ready) < self._config.ahead and not self._closed:
            try:
                self._ready.append(await self._new_call())
            except (SandboxBroken, SandboxFull):  # a call that is wanted makes its own, and says so
                return

    def _forget_ready(self) -> None:
        while self._ready:
            self._over(self._ready.pop())

    async def _attempt(self, request: Request, call: _Call) -> Outcome:
        try:
            reader, writer = await asyncio.open_unix_connection(sock=call.connection)
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
                writer.transport.abort()
        finally:
            self._over(call)
        if outcome.status == "broken":
            raise SandboxBroken(outcome.text)
        return outcome

    async def _send_to_zygote(self, connection: socket.socket, place: int) -> None:
        give_up, pause_s = time.monotonic() + _RESTART_S, 0.1
        while not self._closed:
            control = self._control
            if control is not None and await self._handed_over(control, connection, place):
                return
            if time.monotonic() > give_up:
                raise SandboxBroken("the zygote does not stay alive")
            try:
                await self._start_again(control)
            except SandboxBroken as error:
                if time.monotonic() + pause_s > give_up:
                    raise
                log.error("python tool: the zygote cannot be started: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise SandboxBroken("the service is shutting down")

    async def _handed_over(self, control: socket.socket, connection: socket.socket, place: int) -> bool:
        """Hand a call to the zygote; False: it is gone, or takes nothing. SandboxFull."""
        began = time.monotonic()
        while True:
            try:
                socket.send_fds(control, [PLACE.pack(place)], [connection.fileno()])
                return True
            except BlockingIOError as error:
                if time.monotonic() - began > _SEND_TIMEOUT_S:
                    log.warning("python tool: the zygote takes no calls (%s), starting another", error)
                    return False
            except OSError as error:
                if error.errno not in _SCARCE:
                    log.warning("python tool: the zygote is gone (%s), starting another", error)
                    return False
                # Says nothing about the zygote, which may have a hundred calls running.
                if time.monotonic() - began > _SCARCE_S:
                    raise SandboxFull(f"a call could not be handed over for {_SCARCE_S:g} s: {error}") from error
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _start_again(self, dead: socket.socket | None) -> None:
        async with self._restart:
            if self._control is dead and not self._closed:  # else another call already did it
                self._control = None
                self._forget_ready()
                if dead is not None:
                    dead.close()
                    self.restarts += 1
                await asyncio.to_thread(self._end)
                await asyncio.to_thread(self.start)
                if self._closed:  # meanwhile
                    self.close()

    def _end(self) -> None:
        """End the zygote, which its control socket's end tells it to, and its folder."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(timeout=1.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            # Only a zygote that was killed leaves it: it removes the folder itself, also if the service was killed.
            self._folder.remove()

    def close(self) -> None:
        """End the zygote and every running call, for good."""
        self._closed = True
        self._forget_ready()
        control, self._control = self._control, None
        if control is not None:
            control.close()
        self._end()


async def _connected_pair() -> tuple[socket.socket, socket.socket]:
    """SandboxFull: this process, or the machine, has had no descriptors to spare for a while."""
    began = time.monotonic()
    while True:
        try:
            return socket.socketpair()
        except OSError as error:
            if error.errno not in _SCARCE or time.monotonic() - began > _SCARCE_S:
                raise SandboxFull(f"no connection to a call could be made: {error}") from error
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _end_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Tell a supervisor to end its call, and wait (1 s at most) until its processes are gone."""
    with contextlib.suppress(OSError):  # a TimeoutError too
        writer.write_eof()
        async with asyncio.timeout(1.0):
            await reader.read(-1)
