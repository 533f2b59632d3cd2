"""The process that runs verifiers environments: its start, its end, and calls to it from several threads."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import IO, Any

from arpo_megatron.utils.processes import REAP_DEADLINE_S

_WORKER = Path(__file__).with_name("worker.py")


class VerifiersError(RuntimeError):
    """An episode failed, or the process ended; the text has the reason."""


class VerifiersProcess:
    """A worker (`worker.py`) in the interpreter of an environment. Methods may be called from several threads.

    It ends when its standard input does, and so with this process. Its output goes to the standard error.
    """

    def __init__(self, python: Path, config: Path) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._process = subprocess.Popen(
            [python, "-P", _WORKER, config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment_of(python),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands: IO[bytes] = self._process.stdin
        threading.Thread(target=self._receive, args=(self._process.stdout,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Execute a command of the worker and return its result.

        Raises:
            VerifiersError: the environment failed, or the process has ended.
        """
        reply = self.send(operation, **arguments).result()
        if "error" in reply:
            raise VerifiersError(reply["error"])
        return reply

    def send(self, operation: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Send a command; the result comes later. Raises VerifiersError if the process has ended."""
        result: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            line = json.dumps({"id": number, "op": operation, "arguments": arguments})
            self._waiting[number] = result
            try:
                self._commands.write(f"{line}\n".encode())
                self._commands.flush()
            except OSError:
                del self._waiting[number]
                raise self._ended() from None
        return result

    def _receive(self, results: IO[bytes]) -> None:
        try:
            for line in results:
                reply = json.loads(line)
                self._waiting.pop(reply["id"]).set_result(reply)
        finally:  # also after a line that is no reply
            error = self._ended()
            with self._lock:  # no command is being written
                for waiting in self._waiting.values():
                    waiting.set_exception(error)
                self._waiting.clear()

    def _ended(self) -> VerifiersError:
        """Return why there will be no more replies. A process that has only closed its output is killed."""
        try:
            how = f"ended with status {self._process.wait(REAP_DEADLINE_S)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            how = "sends no more replies and was killed"
        return VerifiersError(f"the verifiers process {how}; the log has the reason")


def _environment_of(python: Path) -> dict[str, str]:
    path = os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))  # where `uv` is
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PATH": path}


def check_loads(python: Path, config: Path, timeout_s: float) -> None:
    """Load an environment in a worker that ends at once.

    Raises:
        VerifiersError: the interpreter lacks verifiers or the environment, or the environment cannot be loaded.
    """
    try:
        done = subprocess.run(
            [python, "-P", _WORKER, config],
            input="",
            env=_environment_of(python),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise VerifiersError(f"{python} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise VerifiersError(f"{config} was not loaded within {timeout_s:g} s") from None
    if done.returncode:
        raise VerifiersError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])


_STARTING = threading.Lock()
_RUNNING: dict[tuple[Path, Path], VerifiersProcess] = {}


def process_of(python: Path, config: Path) -> VerifiersProcess:
    """Return the running worker of an environment; start one if there is none."""
    with _STARTING:
        process = _RUNNING.get((python, config))
        if process is None or not process.alive:
            print(f"verifiers: starting {config} with {python}", file=sys.stderr, flush=True)
            process = _RUNNING[python, config] = VerifiersProcess(python, config)
        return process
