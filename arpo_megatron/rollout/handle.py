"""Trainer rank 0's hold on the rollout process, in which the trees grow (`worker`).

An event loop with thousands of coroutines inside a training rank would delay its kernel launches and be delayed by
them. The process is a service like the engines: supervised, restarted where it dies or hangs. What its trees have
sampled is sent here as it comes, entry by entry (`record`), so a new process goes on with them where the old one was;
a checkpoint holds the same entries.

Both ends speak multiprocessing's `Connection` over a Unix socket in a directory that only this user may enter. A
thread of this process reads it at all times, also while the trainer trains, and connects anew when it is cut.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.rollout.connection import hang_up
from arpo_megatron.rollout.messages import (
    CollectTrees,
    Failure,
    FinishTrees,
    LiveTree,
    Pause,
    RecordEntry,
    Restore,
    Resume,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    ServiceSettings,
    StaleEnginesError,
    StartTrees,
    StopTrees,
)
from arpo_megatron.rollout.record import UnfinishedTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.utils.service_spec import ServiceSpec

_CONNECT_INTERVAL_S = 0.1
_STARTUP_S = 180.0
_CLOSE_DEADLINE_S = 5.0
_GREETING = 0
"""Number of the request with which every connection begins."""


class RolloutError(RuntimeError):
    """The rollout process failed in a way that is not a failed tree; the message holds its traceback or exit code."""


class RolloutHandle:
    """Holds the trees of the rollout process, whichever runs now. Not for several threads at once.

    Also a context manager that closes it.
    """

    def __init__(self, address: Path, settings: ServiceSettings, *, patience_s: float) -> None:
        self._address = address
        self._settings = settings
        self._patience_s = patience_s
        self._lock = threading.Lock()  # of all below
        self._connection: Connection[object, object] | None = None
        self._trees: dict[int, tuple[LiveTree, list[bytes]]] = {}
        self._collected: set[int] = set()  # those of them that were collected
        self._version = 0
        self._paused = False
        self._pending: tuple[int, object] | None = None
        self._broken: Exception | None = None
        self._closed = threading.Event()
        self._answers: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self._numbers, self._requests = itertools.count(), itertools.count(_GREETING + 1)
        self._thread = threading.Thread(target=self._keep_connected, name="rollouts", daemon=True)

    @classmethod
    def connect(cls, address: Path, settings: ServiceSettings, *, patience_s: float = 600.0) -> Self:
        """Wait for the process that listens at `address`; returns when it is ready to grow.

        Args:
            address: of its socket.
            settings: addresses, tokenizer, seed.
            patience_s: how long a restart of it may take.

        Raises:
            UserError: `tokenizer_path` holds no tokenizer.json.
            RolloutError: nobody listens there.
        """
        handle = cls(address, settings, patience_s=patience_s)
        handle._thread.start()
        try:
            handle._answer_to(_GREETING, None)
        except BaseException:
            handle.close()
            raise
        return handle

    def grow_trees(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        version: int,
        settings: RolloutSettings,
        progress: Callable[[RolloutProgress], None] | None = None,
    ) -> RolloutReport:
        """Grow one tree for each task, all at once; blocks until the last one is finished or has failed.

        Args:
            tasks: see `start_trees`, as for the next three.
            step: keys the branching draws.
            version: of the weights the engine holds, at least.
            settings: how to grow.
            progress: called now and then from this thread.

        Raises:
            RolloutError: the process failed. A tree that cannot be finished is no error: see `RolloutReport.failed`.
            StaleEnginesError: see `collect`.
        """
        group = f"call {next(self._numbers)}"
        self.start_trees(group, tasks, step=step, version=version, settings=settings)
        report = self.collect(CollectTrees(group), progress)
        self.discard_collected(group)
        return report

    def start_trees(
        self, group: str, tasks: Sequence[Task], *, step: int, version: int, settings: RolloutSettings
    ) -> None:
        """Begin to grow a tree for each task; returns at once. They go on growing whatever else is called.

        Args:
            group: trees that are collected together.
            tasks: ids may repeat only if equal trees' draws are wanted.
            step: keys the branching draws.
            version: of the weights that the engine holds now, at least.
            settings: how to grow.

        Raises:
            RolloutError: the process broke down.
        """
        self._start([LiveTree(next(self._numbers), group, task, step, version, settings) for task in tasks], version)

    def resume_trees(
        self,
        group: str,
        trees: Sequence[tuple[Task, UnfinishedTree]],
        *,
        version: int,
        settings: RolloutSettings,
    ) -> None:
        """Grow trees on from what they have sampled; see `start_trees`."""
        self._start(
            [
                LiveTree(next(self._numbers), group, task, tree.step, tree.version, settings, tree.entries)
                for task, tree in trees
            ],
            version,
        )

    def unfinished_trees(self, group: str) -> list[UnfinishedTree]:
        """The trees of a group in the order of their start, with all they have sampled.

        Collected trees are included until `discard_collected`, so an interruption while a report arrives loses none.
        """
        with self._lock:
            return [
                UnfinishedTree(tree.task.id, tree.step, tree.version, tuple(entries))
                for tree, entries in self._trees.values()
                if tree.group == group
            ]

    def discard_collected(self, group: str) -> None:
        """Let go of the records of the trees of a group that were collected: nobody will ask for them again."""
        with self._lock:
            done = {number for number in self._collected if self._trees[number][0].group == group}
            self._collected -= done
            for number in done:
                del self._trees[number]

    def collect(
        self, request: CollectTrees, progress: Callable[[RolloutProgress], None] | None = None
    ) -> RolloutReport:
        """Wait for finished trees.

        Raises:
            RolloutError: the process broke down.
            StaleEnginesError: an engine lacks the weights (it was restarted). The trees go on at the others; nothing
                was collected.
        """
        return self._report(request, progress)

    def finish_trees(self, request: FinishTrees, progress: Callable[[RolloutProgress], None] | None = None) -> None:
        """Wait for all trees of a group. Raises what `collect` does."""
        self._call(request, progress)

    def stop_trees(self, request: StopTrees) -> RolloutReport:
        """Give up trees; they are what is reported. Raises RolloutError."""
        return self._report(request)

    def pause(self) -> None:
        """Stop all trees where they are; the engine is idle when this returns. Raises RolloutError."""
        with self._lock:
            self._paused = True  # before it is asked for: a process that begins from here on must not grow
        self._call(Pause())

    def resume(self, version: int) -> None:
        """Let the trees go on with policy `version`. Raises RolloutError."""
        with self._lock:
            self._paused, self._version = False, version
        self._call(Resume(version))

    def close(self) -> None:
        """Let go of the process, which gives all trees up; a second call changes nothing."""
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                hang_up(self._connection)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _start(self, trees: Sequence[LiveTree], version: int) -> None:
        with self._lock:
            self._version = max(self._version, version)
            self._trees |= {tree.tree_id: (tree, list(tree.entries)) for tree in trees}
        self._call(StartTrees(tuple(trees), version))

    def _report(self, request: object, progress: Callable[[RolloutProgress], None] | None = None) -> RolloutReport:
        report = self._call(request, progress)
        if not isinstance(report, RolloutReport):
            raise AssertionError(f"{request!r} was answered with {report!r}")
        return report

    def _call(self, request: object, progress: Callable[[RolloutProgress], None] | None = None) -> object:
        """Send a request and wait for its answer; where the connection is cut, the thread sends it again."""
        with self._lock:
            if self._broken is not None:
                raise RolloutError(f"the rollout process has failed before: {self._broken}")
            number = next(self._requests)
            self._pending = (number, request)
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.send(self._pending)
        try:
            return self._answer_to(number, progress)
        finally:
            with self._lock:
                self._pending = None

    def _answer_to(self, request: int, progress: Callable[[RolloutProgress], None] | None) -> object:
        while True:
            number, answer = self._answers.get()
            if isinstance(answer, Failure):
                text = answer.user_error or f"the rollout process failed:\n{answer.traceback}"
                self._broken = RolloutError(text)
                raise UserError(text) if answer.user_error is not None else self._broken
            if isinstance(answer, RolloutError):
                self._broken = answer
                raise answer
            if number != request:
                continue  # of a call that was interrupted, or another connection's greeting
            if isinstance(answer, StaleEnginesError):
                raise answer
            if not isinstance(answer, RolloutProgress):
                return answer
            if progress is not None:
                progress(answer)

    def _keep_connected(self) -> None:
        """The thread: read what comes, and connect again where that ends.

        Not behind a `Failure`: the same trees might fail again, at once and for ever.
        """
        failed = False
        try:
            while not (failed or self._closed.is_set()):
                connection = self._connected()
                with suppress(EOFError, OSError):
                    self._greet(connection)
                    while not failed:
                        failed = self._take(connection.recv())
                with self._lock:
                    self._connection = None
                connection.close()
        except Exception as error:
            text = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
            self._answers.put((_GREETING, RolloutError(text)))

    def _connected(self) -> "Connection[object, object]":
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                return Client(str(self._address), "AF_UNIX")
            except OSError as error:
                if self._closed.wait(_CONNECT_INTERVAL_S) or time.monotonic() > give_up:
                    raise RolloutError(f"the rollout process is gone: {error.strerror}: {self._address}") from None

    def _greet(self, connection: "Connection[object, object]") -> None:
        """Tell a process what the one before it was doing, if there was one."""
        with self._lock:
            self._connection = connection
            if self._closed.is_set():
                raise EOFError
            trees = tuple(
                LiveTree(tree.tree_id, tree.group, tree.task, tree.step, tree.version, tree.settings, tuple(entries))
                for number, (tree, entries) in self._trees.items()
                if number not in self._collected
            )
            connection.send((_GREETING, Restore(self._settings, StartTrees(trees, self._version), self._paused)))
            if self._pending is not None:
                connection.send(self._pending)

    def _take(self, message: object) -> bool:
        """Keep what came; whether it is the end of everything."""
        if isinstance(message, RecordEntry):
            with self._lock:
                if message.tree_id in self._trees:
                    self._trees[message.tree_id][1].append(message.entry)
            return False
        assert isinstance(message, tuple)
        number, answer = message
        with self._lock:
            if isinstance(answer, RolloutReport):
                self._collected.update(number for number in answer.tree_ids if number in self._trees)
            if self._pending is not None and self._pending[0] == number and not isinstance(answer, RolloutProgress):
                self._pending = None
        self._answers.put((number, answer))
        return isinstance(answer, Failure)


def rollout_service(directory: Path, port: int, *, log_path: Path, hang_timeout_s: float) -> ServiceSpec:
    """How to start the rollout process.

    Args:
        directory: for its socket, `rollout_socket`, in a folder that only this user may enter.
        port: free; on 127.0.0.1 it tells that its event loop runs, and nothing else.
        log_path: file for its output.
        hang_timeout_s: as of `ServiceSpec`.
    """
    command = [sys.executable, "-m", "arpo_megatron.rollout.worker", str(rollout_socket(directory)), str(port)]
    return ServiceSpec(
        name="rollout",
        url=f"http://127.0.0.1:{port}",
        command=command,
        log=log_path,
        environment={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        startup_timeout_s=_STARTUP_S,
        hang_timeout_s=hang_timeout_s,
    )


def rollout_socket(directory: Path) -> Path:
    """Where the process that was started with that directory listens."""
    return directory / "rollout" / "socket"
