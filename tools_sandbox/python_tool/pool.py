"""The pool of python calls, on the service's side: it starts the zygote, sends it calls, and replaces it if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tools_sandbox.config import Limits, PythonConfig
from tools_sandbox.python_tool.protocol import CHUNK, SLOT, THREAD_VARIABLES, Outcome, Request
from tools_sandbox.python_tool.walls import Level, Walls, WorkerLimits
from tools_sandbox.utils.temporary import TemporaryFolder

log = logging.getLogger("tools_sandbox")

_START_TIMEOUT_S = 120.0
_SEND_TIMEOUT_S = 2.0
"""Time limit for handing a call to the zygote, which usually takes microseconds. After that the zygote is replaced."""
_SCARCE_ERRORS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of the hand-over when a shared and temporary resource is exhausted: descriptors, open or in flight; buffers.
Calls, or all processes of a user or of the machine, share these."""
_SCARCE_WAIT_S = 5.0
_POLL_S = 0.02
_RESTART_TIMEOUT_S = 15.0
"""Seconds that a call waits for a new zygote. A machine without free processes or memory may need a while to start
one."""
_KILL_TIMEOUT_S = 4.0
"""Seconds that the service waits for a killed zygote, which the kernel may not end while it waits for a device."""
_MAX_PAUSE_S = 2.0
_PART_BYTES = 1 << 20
"""Part of a state that is read into memory at a time."""
_OVERTIME_S = 10.0
"""Seconds beyond the time limit of a call, which its supervisor enforces, until the supervisor counts as broken."""

_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""If pyarrow is installed, pandas loads it. It would start a thread, which does not survive a fork."""

# -I keeps out the working directory and PYTHON* variables. The package's folder leaves sys.path before any call.
# A call can read its /proc/self/cmdline, so that must not describe the machine. The control socket brings the rest.
_BOOT = """
import json, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
package_parent, arguments = json.loads(control.recv(1 << 20))
sys.path.insert(0, package_parent)
from tools_sandbox.python_tool import fork_hooks
fork_hooks.defer()
from tools_sandbox.python_tool.zygote import main
sys.path.remove(package_parent)
main(control, *arguments)
"""


class SandboxBroken(RuntimeError):  # noqa: N818 - a state
    """The sandbox itself failed, not the code."""


class SandboxFull(RuntimeError):  # noqa: N818 - a state
    """There is no room for a call at the moment. Nothing of it was executed."""


class _Call(NamedTuple):
    """The connection to a call's supervisor, and the call's slot."""

    connection: socket.socket
    slot: int


class PythonPool:
    """Python calls in processes forked from one zygote. Belongs to one event loop once calls are made."""

    def __init__(self, config: PythonConfig, limits: Limits, own_modules: Sequence[str] = ()) -> None:
        """own_modules: modules of the service that calls need. They are loaded before `config.preload`."""
        self._config, self._own_modules = config, list(own_modules)
        self._limits = limits
        self._worker_limits = WorkerLimits(
            limits.cpu_s, limits.memory_mib, limits.file_mib, limits.disk_mib, limits.processes, limits.open_files
        )
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: TemporaryFolder | None = None
        self._closed = False
        self._restart = asyncio.Lock()
        self.restarts = 0
        """Number of zygotes that replaced a dead one."""
        # The lowest free slot is used, so there are never more slots than calls at a time, including waiting ones.
        self._free_slots: list[int] = []
        self._ready: list[_Call] = []
        self._creating: asyncio.Task[None] | None = None
        self._slots = 0
        self.walls: Walls | None = None

    @property
    def alive(self) -> bool:
        """Whether the zygote is running and can be reached."""
        return self._control is not None and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the zygote and wait until it is ready. Raises SandboxBroken with the reason if it cannot start."""
        try:
            control, message = self._spawn()
        except OSError as error:  # TimeoutError is one
            self._end()
            raise SandboxBroken(f"python tool: cannot start {sys.executable}: {error}") from error
        try:
            self._check_walls(json.loads(message or b'{"error": "it ended at its start"}'))
        except SandboxBroken:
            control.close()
            self._end()
            raise
        self._control = control

    def _check_walls(self, ready: dict[str, Any]) -> None:
        """Check the zygote's walls. Raises SandboxBroken if it failed or its walls are not sufficient."""
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
        if ready["threads"] > 1:
            log.warning("python.preload: %d threads run in the process that calls are forked from", ready["threads"])

    def _spawn(self) -> tuple[socket.socket, bytes]:
        """Start the zygote. Return the control socket and the zygote's first message; empty if it ended before."""
        self._folder = TemporaryFolder("tools_sandbox-python-")
        root = self._folder.path
        # A call's user needs search permission to reach its working directory.
        root.chmod(0o711)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        preload = (self._own_modules, list(self._config.preload))
        arguments = (str(root), preload, asdict(self._worker_limits))
        try:
            with theirs:
                control.send(json.dumps((str(Path(__file__).resolve().parents[2]), arguments)).encode())
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**dict.fromkeys(THREAD_VARIABLES, "1"), **_NO_THREADS},
                    cwd="/",
                    # Ctrl-C in a terminal reaches only the service, which then ends the zygote.
                    start_new_session=True,
                )
            control.settimeout(_START_TIMEOUT_S)
            message = control.recv(1 << 16)
        except BaseException:
            control.close()
            raise
        control.setblocking(False)
        return control, message

    async def run(
        self, code: str, timeout_s: float, *, state: BinaryIO | None = None, keep: BinaryIO | None = None
    ) -> Outcome:
        """Run code in a fresh process for at most `timeout_s` seconds of wall-clock time, or the configured limit.

        state: file with the state that the code begins with. keep: empty file that receives the state after the call;
        it is complete if the outcome `has_state`.
        Raises SandboxBroken if the sandbox failed twice, SandboxFull, and OSError if `keep` cannot be written. If the
        awaiting task is cancelled, so is the code.
        """
        limits = self._limits
        request = Request(
            code=code,
            time_s=min(timeout_s, limits.time_s),
            output_chars=limits.output_chars,
            output_mib=limits.output_mib,
            state_mib=0 if keep is None else limits.state_mib,
        )
        try:
            return await self._attempt(request, self._take_ready() or await self._new_call(), state, keep)
        except SandboxBroken as error:
            log.warning("python tool: %s; trying once more", error)
            return await self._attempt(request, await self._new_call(), state, keep)

    async def _new_call(self) -> _Call:
        """Let the zygote fork a call, which waits for its request."""
        ours, theirs = await _connected_pair()
        if not self._free_slots:
            heapq.heappush(self._free_slots, self._slots)
            self._slots += 1
        slot = heapq.heappop(self._free_slots)
        with theirs:
            try:
                ours.setblocking(False)
                await self._send_to_zygote(theirs, slot)
            except BaseException:
                self._release(_Call(ours, slot))
                raise
        return _Call(ours, slot)

    def _release(self, call: _Call) -> None:
        """Free the slot of a call. The closed connection ends the call in any state."""
        call.connection.close()
        heapq.heappush(self._free_slots, call.slot)

    def _take_ready(self) -> _Call | None:
        """Return a call that was created ahead, if any, and begin to create its replacement."""
        if self._creating is None or self._creating.done():
            self._creating = asyncio.create_task(self._create_ahead())
        if not self.alive:
            self._drop_ready()  # before a new zygote starts, which removes the leftovers of this one
        return self._ready.pop(0) if self._ready else None

    async def _create_ahead(self) -> None:
        walls = self.walls
        hidden = walls is not None and walls.processes and walls.counts_processes()
        while hidden and len(self._ready) < self._config.ahead and not self._closed:
            try:
                self._ready.append(await self._new_call())
            except (SandboxBroken, SandboxFull):  # the next call tries again and reports the error
                return

    def _drop_ready(self) -> None:
        while self._ready:
            self._release(self._ready.pop())

    async def _attempt(self, request: Request, call: _Call, state: BinaryIO | None, keep: BinaryIO | None) -> Outcome:
        try:
            reader, writer = await asyncio.open_unix_connection(sock=call.connection)
            try:
                async with asyncio.timeout(request.time_s + _OVERTIME_S):
                    await _send(writer, request, state)
                    lost = await _receive_state(reader, keep)
                    outcome = Outcome.decode(await reader.read(-1))
            except asyncio.CancelledError:
                await _end_call(reader, writer)
                raise
            except (OSError, ValueError, EOFError) as error:  # TimeoutError is an OSError
                raise SandboxBroken(f"no outcome: {error!r}") from error
            finally:
                writer.transport.abort()
        finally:
            self._release(call)
        if outcome.status == "broken":
            raise SandboxBroken(outcome.text)
        if lost is not None:
            raise lost
        return outcome

    async def _send_to_zygote(self, connection: socket.socket, slot: int) -> None:
        give_up, pause_s = time.monotonic() + _RESTART_TIMEOUT_S, 0.1
        while not self._closed:
            control = self._control
            if control is not None and await self._hand_over(control, connection, slot):
                return
            if time.monotonic() > give_up:
                raise SandboxBroken("the zygote does not stay alive")
            try:
                await self._restart_zygote(control)
            except SandboxBroken as error:
                if time.monotonic() + pause_s > give_up:
                    raise
                log.error("python tool: the zygote cannot be started: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        raise SandboxBroken("the service is shutting down")

    async def _hand_over(self, control: socket.socket, connection: socket.socket, slot: int) -> bool:
        """Hand a call to the zygote. Return False if the zygote is gone or accepts nothing. Raises SandboxFull."""
        began = time.monotonic()
        while True:
            try:
                socket.send_fds(control, [SLOT.pack(slot)], [connection.fileno()])
                return True
            except BlockingIOError as error:
                if time.monotonic() - began > _SEND_TIMEOUT_S:
                    log.warning("python tool: the zygote takes no calls (%s), starting another", error)
                    return False
            except OSError as error:
                if error.errno not in _SCARCE_ERRORS:
                    log.warning("python tool: the zygote is gone (%s), starting another", error)
                    return False
                # Not the zygote's fault, which may have a hundred calls running.
                if time.monotonic() - began > _SCARCE_WAIT_S:
                    raise SandboxFull(f"a call could not be handed over for {_SCARCE_WAIT_S:g} s: {error}") from error
            await asyncio.sleep(_POLL_S)

    async def _restart_zygote(self, dead: socket.socket | None) -> None:
        async with self._restart:
            if self._control is dead and not self._closed:  # else another call already did it
                self._control = None
                self._drop_ready()
                if dead is not None:
                    dead.close()
                    self.restarts += 1
                await asyncio.to_thread(self._end)
                await asyncio.to_thread(self.start)
                if self._closed:  # meanwhile
                    self.close()

    def _end(self) -> None:
        """Wait for the zygote, which ends when its control socket is closed, and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(timeout=1.5)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_KILL_TIMEOUT_S)
        if self._folder is not None:
            # A zygote removes the folder itself, even if the service was killed, unless it was killed too.
            self._folder.remove()

    def close(self) -> None:
        """End the zygote and every running call for good."""
        self._closed = True
        self._drop_ready()
        control, self._control = self._control, None
        if control is not None:
            control.close()
        self._end()


async def _connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets. Raises SandboxFull if no descriptors become free for a while."""
    began = time.monotonic()
    while True:
        try:
            return socket.socketpair()
        except OSError as error:
            if error.errno not in _SCARCE_ERRORS or time.monotonic() - began > _SCARCE_WAIT_S:
                raise SandboxFull(f"no connection to a call could be made: {error}") from error
        await asyncio.sleep(_POLL_S)


async def _send(writer: asyncio.StreamWriter, request: Request, state: BinaryIO | None) -> None:
    """Send a request and its state, in parts. Raises OSError."""
    if state is None:
        writer.write(request.encode(0))
        return
    writer.write(request.encode(state.seek(0, os.SEEK_END)))
    state.seek(0)
    while part := await asyncio.to_thread(state.read, _PART_BYTES):
        writer.write(part)
        await writer.drain()


async def _receive_state(reader: asyncio.StreamReader, keep: BinaryIO | None) -> OSError | None:
    """Write the state to a file as it arrives. Return why it could not be written. Raises OSError or EOFError."""
    lost = None
    if keep is not None:
        keep.seek(0)
        keep.truncate()
    while size := CHUNK.unpack(await reader.readexactly(CHUNK.size))[0]:
        chunk = await reader.readexactly(size)
        if keep is not None and lost is None:
            try:
                await asyncio.to_thread(keep.write, chunk)
            except OSError as error:  # the disk is full
                lost = error
    return lost


async def _end_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask a supervisor to end its call. Wait until its processes are gone, but at most 1 s."""
    with contextlib.suppress(OSError):  # includes TimeoutError
        writer.write_eof()
        async with asyncio.timeout(1.0):
            await reader.read(-1)
