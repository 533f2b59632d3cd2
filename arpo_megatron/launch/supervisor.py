"""The processes of a job: started, watched, restarted if they are services, and ended together.

A process that runs once (a trainer rank, a preparation) ends the job when it fails. A service that ends, or that does
not answer its probe in time (a hung one still holds its connections), is killed with its process group and started
again at the same address, after a pause that doubles. Its clients repeat their requests. After a number of restarts
within an hour the job ends.

Every process leads a session, so a ctrl-C reaches the command line alone, which ends the processes in order. The kernel
kills them if the command line is killed, so nothing is left behind.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import requests

from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import ServiceHealth, write_health, write_scrape_targets
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.utils.processes import (
    GRACE_S,
    REAP_DEADLINE_S,
    ProcessDiedError,
    exit_code,
    first_failure,
    how_it_ended,
    last_lines,
    stop_groups,
)
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.signals import interrupts_deferred, interrupts_ignored

FIRST_PAUSE_S = 0.5
RESTARTS_WITHIN_S = 3600.0
"""Restarts of services are counted over this time."""
LONGEST_PAUSE_S = 60.0
RECOVERED_S = 60.0
"""A service that was up for this long pauses before its next restart as briefly as before the first."""
MAX_LOG_BYTES = 2**28
"""Size at which a log is rotated."""
_SIZE_INTERVAL_S = 60.0
_POLL_INTERVAL_S = 0.1
_PROBE_INTERVAL_S = 5.0


@dataclass(slots=True)
class SupervisedProcess:
    """A process group of the job; for a service the one that runs now."""

    spec: ServiceSpec
    process: "subprocess.Popen[bytes] | None" = None
    log_start: int = 0
    """Size of the log in bytes before the first start."""
    up: bool = False
    since: float = field(default_factory=time.time)
    """Time of the start, or of the last change of `up`."""
    restarts: int = 0
    error: str = ""
    """Why it was last restarted."""
    sized: float = field(default_factory=time.monotonic)
    """When the size of the log was last checked."""

    @property
    def log(self) -> Path:
        """Log file that receives the stdout and stderr of the process."""
        return self.spec.log

    def poll(self) -> int | None:
        """Return the return code, None while it runs."""
        return None if self.process is None else self.process.poll()

    def log_lines(self) -> Iterator[str]:
        """Yield the lines, with their ends, that the process has written to its log since its first start."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            for line in log:
                yield line.decode(errors="replace")

    def rotate_log(self) -> None:
        """Move a log that has grown too large to NAME.log.1, once a minute at most.

        The process keeps its file, which is emptied. Lines that it writes during the copy are lost.
        """
        if time.monotonic() - self.sized < _SIZE_INTERVAL_S:
            return
        self.sized = time.monotonic()
        with suppress(OSError):  # no room, or no log yet
            if self.log.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
                os.truncate(self.log, 0)  # opened to append
                self.log_start = 0

    def failure(self) -> str:
        """Return the message for the user when a process that runs once has ended."""
        report = first_failure(self.log, self.log_start) or last_lines(self.log, self.log_start)
        return f"{self.spec.name} {how_it_ended(self.poll() or 0)}; log: {self.log}\n{report}"

    def health(self) -> ServiceHealth:
        """Return its row of `arpo health`."""
        return ServiceHealth(
            name=self.spec.name,
            pid=self.process.pid if self.process is not None else None,
            up=self.up,
            since=self.since,
            restarts=self.restarts,
            last_error=self.error,
            url=self.spec.url,
            log=str(self.log),
        )

    def set_up(self, up: bool) -> None:
        """Record that it came up or went down."""
        self.up, self.since = up, time.time()


class Supervisor:
    """Starts the processes of a job, and ends all of them on leaving the `with` block.

    Args:
        logs: directory for the logs of processes that run once.
    """

    def __init__(self, logs: Path) -> None:
        self.running: list[SupervisedProcess] = []
        """Processes that run once and have not been waited for."""
        self.checks: list[Callable[[], None]] = []
        """Called while a process is waited for; one that raises ends the wait."""
        self._logs = logs
        self._services: _Services | None = None

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> SupervisedProcess:
        """Start a process that runs once; its output goes to `<logs>/<name>.log`."""
        spec = ServiceSpec(name, command, self._logs / f"{name}.log", {**os.environ, **(env or {})})
        log_start = spec.log.stat().st_size if spec.log.exists() else 0
        with interrupts_deferred():
            process = SupervisedProcess(spec, spec.start(), log_start, up=True)
            self.running.append(process)
        if self._services is not None:
            self._services.write_health()
        return process

    def wait(
        self, process: SupervisedProcess, *, poll: Callable[[], None] = lambda: None, every_s: float = 0.1
    ) -> None:
        """Wait until `process` ends with exit code 0, and call `poll` meanwhile.

        Raises:
            ProcessDiedError: it or a service failed, or another process that runs once ended.
        """
        while True:
            poll()
            self.check()
            for each in self.running:
                each.rotate_log()
                code = each.poll()
                if code is not None and (code != 0 or each is not process):
                    raise ProcessDiedError(each.failure(), exit_code(code))
            if process.poll() is not None:
                self.forget(process)
                poll()
                return
            time.sleep(every_s)

    def forget(self, process: SupervisedProcess) -> None:
        """Stop watching a process that runs once; the caller has seen it end."""
        self.running.remove(process)

    def end(self, process: SupervisedProcess) -> None:
        """End a process that runs once, before its time."""
        self.forget(process)
        if process.process is not None:
            _stop([process.process])

    def check(self) -> None:
        """Call all `checks`. Raises ProcessDiedError if a service has failed for good."""
        for check in self.checks:
            check()
        if self._services is not None and self._services.failure is not None:
            raise self._services.failure

    @contextmanager
    def serving(self, run: RunDirectory, *, restarts: int, trainer: str = "") -> Iterator[None]:
        """Inside the block, `serve` starts services and `run.health` shows them; all services end with the block.

        Args:
            run: its event log gets every restart, and `run.health` every change.
            restarts: of all services together within `RESTARTS_WITHIN_S`, before the job ends.
            trainer: URL with the trainer's metrics, for Prometheus; "" if there is none.
        """
        self._services = services = _Services(run, restarts, trainer, lambda: [each.health() for each in self.running])
        try:
            yield
        finally:
            with interrupts_ignored():
                services.close()
                self._services = None

    def serve(self, *specs: ServiceSpec) -> None:
        """Start services; return when all of them are ready.

        Raises:
            ProcessDiedError: one ended or missed its deadline at its first start; the message holds the end of its log.
        """
        if self._services is None:
            raise RuntimeError("services are started inside `serving`")
        services = [self._services.start(spec) for spec in specs]
        while not all(service.up for service in services):
            self.check()
            time.sleep(_POLL_INTERVAL_S / 2)

    def stop(self) -> None:
        """End all processes that run once: SIGTERM, then SIGKILL after GRACE_S. A ctrl-C does not interrupt it."""
        with interrupts_ignored():
            _stop([each.process for each in self.running if each.process is not None])
        self.running.clear()


class _Services:
    """The services of a job. A thread for each starts it, probes it, and starts it again."""

    def __init__(
        self, run: RunDirectory, restarts: int, trainer: str, others: Callable[[], list[ServiceHealth]]
    ) -> None:
        self.failure: ProcessDiedError | None = None
        self._services: list[SupervisedProcess] = []
        self._threads: list[threading.Thread] = []
        self._restarts = restarts
        self._restarted: list[float] = []
        self._events = EventLog(run.events)
        self._ending = threading.Event()
        self._starting = threading.Lock()
        self._health, self._targets, self._trainer = run.health, run.scrape_targets, trainer
        self._others, self._writing = others, threading.Lock()

    def write_health(self) -> None:
        """Write the health of all processes of the job."""
        with self._writing, suppress(OSError):  # a full disk must not end what keeps the job alive
            services = [each.health() for each in self._services]
            write_health(self._health, [*services, *self._others()])
            write_scrape_targets(self._targets, services, self._trainer)

    def start(self, spec: ServiceSpec) -> SupervisedProcess:
        """Start a service in its thread."""
        service = SupervisedProcess(spec)
        thread = threading.Thread(target=self._run_guarded, args=(service,), name=f"supervise {spec.name}", daemon=True)
        self._services.append(service)
        self._threads.append(thread)
        self.write_health()
        thread.start()
        return service

    def close(self) -> None:
        """End all services and their threads."""
        with self._starting:  # no thread starts a process after this
            self._ending.set()
        for grace_s in sorted({service.spec.grace_s for service in self._services}):
            same = [service for service in self._services if service.spec.grace_s == grace_s]
            _stop([service.process for service in same if service.process is not None], grace_s)
        for thread in self._threads:
            if thread.ident is not None:  # else a signal came before its start
                thread.join(REAP_DEADLINE_S)
        self._health.unlink(missing_ok=True)
        self._targets.unlink(missing_ok=True)

    def _run_guarded(self, service: SupervisedProcess) -> None:
        """Run the restart loop; a bug in it ends the job."""
        try:
            self._restart_loop(service)
        except Exception as error:
            text = f"{service.spec.name} cannot be supervised any longer: {type(error).__name__}: {error}"
            self.failure = ProcessDiedError(text)

    def _restart_loop(self, service: SupervisedProcess) -> None:
        """Start a service, and again whenever it is down, until that has happened too often."""
        spec, pause_s = service.spec, FIRST_PAUSE_S
        while True:
            with self._starting:
                if self._ending.is_set():
                    return None
                service.process = process = spec.start()
            self.write_health()
            error, code = self._watch(service, process)
            if self._ending.is_set():
                with suppress(subprocess.TimeoutExpired):  # the kernel kills it when this thread ends
                    process.wait(spec.grace_s + REAP_DEADLINE_S)
                return None
            was_up_s = time.time() - service.since if service.up else None
            service.error = error  # first: without it, a process that is not up counts as starting
            service.set_up(False)
            self.write_health()
            if stop_groups([process], spec.restart_grace_s):
                service.error = error = f"{error}; {_unkillable([process.pid])}"
            if was_up_s is None and not service.restarts:
                return self._fail(service, "", code)
            with self._starting:
                self._restarted = [at for at in self._restarted if time.monotonic() - at < RESTARTS_WITHIN_S]
                if (number := len(self._restarted)) >= self._restarts:
                    more = f", after {number} restarts of services within an hour (engine.restarts)"
                    return self._fail(service, more, code)
                self._restarted.append(time.monotonic())
            if was_up_s is not None and was_up_s > RECOVERED_S:
                pause_s = FIRST_PAUSE_S
            service.restarts += 1
            self._log(service, "down", f"{error}; restart {number + 1} of {self._restarts} in {pause_s:g} s")
            self._ending.wait(pause_s)
            while spec.held_by is not None and spec.held_by.exists() and not self._ending.is_set():
                self._ending.wait(_POLL_INTERVAL_S)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _watch(self, service: SupervisedProcess, process: "subprocess.Popen[bytes]") -> tuple[str, int]:
        """Wait until a service is down; return the cause as a phrase, and the exit code of the job if it ends here."""
        spec = service.spec
        deadline, next_probe = time.monotonic() + spec.startup_timeout_s, 0.0
        while not self._ending.is_set():
            if (code := process.poll()) is not None:
                return how_it_ended(code), exit_code(code)
            service.rotate_log()
            now = time.monotonic()
            if now >= deadline:
                late = f"did not answer for {spec.hang_timeout_s:g} s"
                return late if service.up else f"was not ready after {spec.startup_timeout_s:g} s", 1
            if now >= next_probe and _answers(spec.url + (spec.alive if service.up else spec.ready), deadline - now):
                if not service.up:
                    service.set_up(True)
                    self.write_health()
                    if service.restarts:
                        self._log(service, "up", "is up again")
                deadline = time.monotonic() + spec.hang_timeout_s
                next_probe = time.monotonic() + min(_PROBE_INTERVAL_S, spec.hang_timeout_s / 4)
            self._ending.wait(_POLL_INTERVAL_S)
        return "", 1

    def _fail(self, service: SupervisedProcess, more: str, code: int) -> None:
        spec = service.spec
        text = f"{spec.name} {service.error}{more}; log: {spec.log}\n{last_lines(spec.log)}"
        self.failure = ProcessDiedError(text, code)

    def _log(self, service: SupervisedProcess, state: Literal["down", "up"], text: str) -> None:
        name, number = service.spec.name, len(self._restarted)
        with suppress(OSError):  # a full disk must not end what keeps the job alive
            self._events.emit("restart", service=name, state=state, number=number, text=f"{name} {text}")


def _stop(processes: "Sequence[subprocess.Popen[bytes]]", grace_s: float = GRACE_S) -> None:
    """Do `stop_groups`, and print which processes the kernel does not end."""
    if left := stop_groups(processes, grace_s):
        print(f"arpo: {_unkillable(left)}", file=sys.stderr, flush=True)


def _unkillable(pids: Sequence[int]) -> str:
    numbers = ", ".join(map(str, pids))
    return f"SIGKILL has not ended process {numbers}: it waits for a device or a filesystem and may hold memory"


def _answers(url: str, timeout_s: float) -> bool:
    """Return whether a GET is answered with 200 in time. Each probe has its own connection: the process may be new."""
    try:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(url, timeout=timeout_s).status_code == 200
    except requests.RequestException:
        return False
