"""The services of a job (engines, their router, the tool service): started, watched, and restarted when they fail.

A service that ends, or that does not answer its probe in time (a hung one still holds its connections open), is killed
with its whole process group and started again at the same address, after a pause that doubles. What was asked of it
meanwhile is repeated by those who asked. After `restarts` of them the job stops.

All of it runs in one thread with an event loop of its own, so it goes on while the main thread waits for a rank.
"""

import asyncio
import subprocess
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import HealthPage, ServiceHealth
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.utils.processes import (
    ManagedProcess,
    ManagedProcesses,
    ProcessDiedError,
    exit_code,
    how_it_ended,
    last_lines,
    stop_groups,
)
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.signals import interrupts_ignored

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
SOUND_S = 60.0
"""A service that was up for so many seconds has recovered: its next restart pauses as shortly as the first."""
_POLL_INTERVAL_S = 0.1
_PROBE_INTERVAL_S = 5.0


@dataclass(slots=True)
class _SupervisedService:
    """A program and the process that runs it now."""

    program: ServiceSpec
    process: "subprocess.Popen[bytes] | None" = None
    up: bool = False
    since: float = field(default_factory=time.time)
    restarts: int = 0
    pause_s: float = FIRST_PAUSE_S
    error: str = ""
    code: int = 1

    def health(self) -> ServiceHealth:
        return ServiceHealth(
            name=self.program.name,
            pid=self.process.pid if self.process is not None else None,
            up=self.up,
            since=self.since,
            restarts=self.restarts,
            last_error=self.error,
            url=self.program.url,
            log=str(self.program.log),
        )

    def turn(self, *, up: bool) -> None:
        self.up, self.since = up, time.time()


class Supervisor:
    """Keeps services up while the `with` block runs, and serves the health page.

    Args:
        run: whose `events` are told of every restart, and where the health page's address is written.
        processes: the job's other processes, for the page; their `wait` also ends when a service has failed for good.
        restarts: of all services together, before the job stops.
    """

    def __init__(self, run: RunDirectory, processes: ManagedProcesses, *, restarts: int) -> None:
        self.restarted = 0
        self._run = run
        self._processes = processes
        self._restarts = restarts
        self._events = EventLog(run.events)
        self._services: list[_SupervisedService] = []
        self._failure: ProcessDiedError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="supervisor", daemon=True)
        self._http: aiohttp.ClientSession | None = None
        self._page = HealthPage(self._health)

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._open())
        self._processes.checks.append(self.check)
        return self

    def __exit__(self, *_exception: object) -> None:
        with interrupts_ignored():
            self._processes.checks.remove(self.check)
            self._in_loop(self._close())
            for grace_s in sorted({service.program.grace_s for service in self._services}):
                same = [service for service in self._services if service.program.grace_s == grace_s]
                stop_groups([service.process for service in same if service.process is not None], grace_s)
            # Last: the kernel kills bound services with the thread that started them.
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def start(self, *programs: ServiceSpec) -> None:
        """Start services side by side; returns when all of them are ready, and from then on keeps them so.

        Raises:
            ProcessDiedError: one ended or missed its deadline at its first start; the message holds the end of its log.
        """
        services = [_SupervisedService(program) for program in programs]
        self._services += services
        for service in services:
            asyncio.run_coroutine_threadsafe(self._guard(service), self._loop)
        while not all(service.up for service in services):
            self._processes.check()
            time.sleep(_POLL_INTERVAL_S / 2)

    def check(self) -> None:
        """Raise ProcessDiedError when a service has failed for good."""
        if self._failure is not None:
            raise self._failure

    async def _guard(self, service: _SupervisedService) -> None:
        """A defect here, or a machine that can start no more processes, stops the job instead of its supervision."""
        try:
            await self._keep(service)
        except Exception as error:
            text = f"{service.program.name} cannot be watched any longer: {type(error).__name__}: {error}"
            self._failure = ProcessDiedError(text)

    async def _keep(self, service: _SupervisedService) -> None:
        """Start a service, and again whenever it is down, until that has happened too often."""
        program = service.program
        while True:
            service.process, service.code = program.start(), 1
            why = await _first(self._until_dead(service), self._until_silent(service))
            was_up_s = time.time() - service.since if service.up else None
            service.turn(up=False)
            service.error = why
            await asyncio.to_thread(stop_groups, [service.process], program.restart_grace_s)
            if was_up_s is None and not service.restarts:
                return self._fail(service, "")
            if self.restarted >= self._restarts:
                return self._fail(service, f", after {self.restarted} restarts of services (engine.restarts)")
            if was_up_s is not None and was_up_s > SOUND_S:
                service.pause_s = FIRST_PAUSE_S
            self.restarted += 1
            service.restarts += 1
            text = f"{program.name} {why}; restart {self.restarted} of {self._restarts} in {service.pause_s:g} s"
            self._tell(service, text)
            await asyncio.sleep(service.pause_s)
            while program.held_by is not None and program.held_by.exists():
                await asyncio.sleep(_POLL_INTERVAL_S)
            service.pause_s = min(2 * service.pause_s, LONGEST_PAUSE_S)

    def _tell(self, service: _SupervisedService, text: str) -> None:
        with suppress(OSError):  # a full disk must not end what keeps the job alive
            self._events.emit("restart", role=service.program.name, number=self.restarted, text=text)

    def _fail(self, service: _SupervisedService, more: str) -> None:
        program = service.program
        text = f"{program.name} {service.error}{more}; log: {program.log}\n{last_lines(program.log)}"
        self._failure = ProcessDiedError(text, service.code)

    async def _until_dead(self, service: _SupervisedService) -> str:
        """Returns how its process has ended."""
        if service.process is None:
            raise AssertionError("a service is watched after it was started")
        while service.process.poll() is None:
            await asyncio.sleep(_POLL_INTERVAL_S)
        service.code = exit_code(service.process.returncode)
        return how_it_ended(service.process.returncode)

    async def _until_silent(self, service: _SupervisedService) -> str:
        """Marks a service as up when it is ready; returns in which way it has failed to answer."""
        program = service.program
        if not await self._answers(program.url + program.ready, program.startup_timeout_s):
            return f"was not ready after {program.startup_timeout_s:g} s"
        service.turn(up=True)
        if service.restarts:
            self._tell(service, f"{program.name} is up again")
        while await self._answers(program.url + program.alive, program.hang_timeout_s):
            await asyncio.sleep(min(_PROBE_INTERVAL_S, program.hang_timeout_s / 4))
        return f"did not answer for {program.hang_timeout_s:g} s"

    async def _answers(self, url: str, timeout_s: float) -> bool:
        """Ask until the answer is 200; False: it was not within `timeout_s` seconds."""
        if self._http is None:
            raise AssertionError("the supervisor is used inside `with`")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    with suppress(aiohttp.ClientError):
                        async with self._http.get(url) as response:
                            if response.status == 200:
                                return True
                    await asyncio.sleep(_POLL_INTERVAL_S)
        return False

    async def _open(self) -> None:
        # No deadline and no kept connections: `_answers` has the deadline, and the process may be another next time.
        connector = aiohttp.TCPConnector(force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        await self._page.open(self._run.health)

    async def _close(self) -> None:
        """End all tasks of the loop; none starts a process after this."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._page.close(self._run.health)
        if self._http is not None:
            await self._http.close()

    def _in_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _health(self) -> list[ServiceHealth]:
        return [*(service.health() for service in self._services), *map(_role_health, self._processes.running)]


def _role_health(role: ManagedProcess) -> ServiceHealth:
    """A role that is not a service runs for as long as it is listed."""
    return ServiceHealth(role.name, role.process.pid, True, role.started, 0, "", "", str(role.log))


async def _first(*coroutines: Coroutine[Any, Any, str]) -> str:
    """The result of the one that ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
