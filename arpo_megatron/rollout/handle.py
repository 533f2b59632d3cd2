"""Trainer rank 0's handle of the rollout process (`worker`), in which the trees grow.

An event loop with thousands of coroutines inside a training rank would delay its kernel launches, and be delayed by
them. So the rollout process is a service like the engines: supervised, and restarted if it dies or hangs. It sends the
entries of its trees' records here as they are made. A new process gets them and continues where the old one stopped;
checkpoints store the same entries.

Both ends use multiprocessing's `Connection` over a Unix socket in a directory that only this user may enter. A thread
reads it at all times, also while the trainer trains, and reconnects when it is cut.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.rollout.connection import connect, hang_up
from arpo_megatron.rollout.lost_branches import AnsweredShares
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FailedTree,
    Failure,
    FinishedTree,
    FinishTrees,
    LiveTree,
    Pause,
    RecordEntry,
    ReportPart,
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
from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.heartbeat import beat

_CLOSE_DEADLINE_S = 5.0
_GREETING = 0
"""Id of the first request of each connection."""


class RolloutError(RuntimeError):
    """The rollout process failed, not just a tree; the message has its traceback or what happened."""


class RolloutHandle:
    """Starts, collects and restores trees in the rollout process. Also a context manager that closes it.

    It must not be used by several threads at the same time.
    """

    def __init__(self, address: Path, settings: ServiceSettings, *, patience_s: float) -> None:
        self._address = address
        self._settings = settings
        self._patience_s = patience_s
        self._lock = threading.Lock()  # protects the fields below
        self._connection: Connection[object, object] | None = None
        self._trees: dict[int, tuple[LiveTree, list[bytes]]] = {}
        self._collected: set[int] = set()  # ids of collected trees that are still in _trees
        self._version = 0
        self._paused = False
        self._pending: tuple[int, object] | None = None
        self._finished: dict[int, RolloutTree] = {}  # not collected yet
        self._shares: dict[str, AnsweredShares] = {}  # by purpose; here, because the process may be restarted
        self._parts: list[FailedTree] = []  # of a report that is arriving
        self._broken: Exception | None = None
        self._closed = threading.Event()
        self._answers: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self._numbers, self._requests = itertools.count(), itertools.count(_GREETING + 1)
        self._thread = threading.Thread(target=self._keep_connected, name="rollouts", daemon=True)

    @classmethod
    def connect(cls, address: Path, settings: ServiceSettings, *, patience_s: float = 600.0) -> Self:
        """Wait for the process that listens at `address` until it is ready to grow trees.

        Args:
            address: its socket.
            settings: addresses, tokenizer, seed.
            patience_s: time that a restart of the process may take.

        Raises:
            UserError: `tokenizer_path` has no tokenizer.json.
            RolloutError: no process listens at `address`.
        """
        handle = cls(address, settings, patience_s=patience_s)
        handle._thread.start()
        try:
            handle._answer_to(_GREETING)
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
        """Grow one tree for each task and wait for all of them.

        Args:
            tasks: see `start_trees`.
            step: see `start_trees`.
            version: see `start_trees`.
            settings: see `start_trees`.
            progress: called from this thread now and then.

        Raises:
            RolloutError: the process failed. A tree that cannot be finished is reported in `RolloutReport.failed`.
            StaleEnginesError: see `collect`.
        """
        purpose = f"call {next(self._numbers)}"
        self.start_trees(purpose, tasks, step=step, version=version, settings=settings)
        report = self.collect(CollectTrees(purpose), progress)
        self.discard_collected(purpose)
        return report

    def start_trees(
        self, purpose: str, tasks: Sequence[Task], *, step: int, version: int, settings: RolloutSettings
    ) -> None:
        """Start a tree for each task and return at once. The trees grow until they are finished or stopped.

        Args:
            purpose: what the trees are for; trees of one purpose are collected together.
            tasks: equal task ids make equal draws.
            step: rollout step, part of the key of branching draws.
            version: policy version that the engines have now, at least.
            settings: how the trees are grown.

        Raises:
            RolloutError: the process failed.
        """
        self._start([LiveTree(next(self._numbers), purpose, task, step, version, settings) for task in tasks], version)

    def resume_trees(
        self,
        purpose: str,
        trees: Sequence[tuple[Task, UntrainedTree]],
        *,
        version: int,
        settings: RolloutSettings,
    ) -> None:
        """Continue trees from what they have sampled; see `start_trees`."""
        self._start(
            [
                LiveTree(next(self._numbers), purpose, task, tree.step, tree.version, settings, tree.entries)
                for task, tree in trees
            ],
            version,
        )

    def unfinished_trees(self, purpose: str) -> list[UntrainedTree]:
        """Return the trees of one purpose, in the order of their start, with all they have sampled.

        Collected trees are included until `discard_collected`, so that an interruption after `collect` loses none.
        """
        with self._lock:
            return [
                UntrainedTree(tree.task.id, tree.step, tree.version, tuple(entries), tree.tree_id)
                for tree, entries in self._trees.values()
                if tree.purpose == purpose
            ]

    def discard_collected(self, purpose: str) -> None:
        """Drop the records of the collected trees of one purpose, which are safe elsewhere now."""
        with self._lock:
            done = {tree_id for tree_id in self._collected if self._trees[tree_id][0].purpose == purpose}
            self._collected -= done
            for tree_id in done:
                del self._trees[tree_id]

    def collect(
        self,
        request: CollectTrees,
        progress: Callable[[RolloutProgress], None] | None = None,
        finished: Callable[[Task, RolloutTree], None] | None = None,
    ) -> RolloutReport:
        """Wait for finished trees.

        Args:
            request: which trees to wait for.
            progress: called from this thread now and then.
            finished: called from this thread with trees that are finished while others grow. A tree is given again, as
                the same object, if it is left for a later collection or the process was restarted.

        Raises:
            RolloutError: the process failed.
            StaleEnginesError: an engine was restarted and lacks the weights. Its trees continue on the others, and
                nothing was collected.
        """
        if finished is not None:
            with self._lock:
                known = list(self._finished)
            for tree_id in known:
                self._give(tree_id, request.purpose, finished)
        return self._report(request, progress, lambda tree_id: self._give(tree_id, request.purpose, finished))

    def finish_trees(self, request: FinishTrees, progress: Callable[[RolloutProgress], None] | None = None) -> None:
        """Wait until all trees of one purpose are finished. Raises the errors of `collect`."""
        self._call(request, progress)

    def stop_trees(self, request: StopTrees) -> RolloutReport:
        """Stop trees and report them. Raises RolloutError."""
        return self._report(request)

    def pause(self) -> None:
        """Hold all trees and wait until the engines are idle. Raises RolloutError."""
        with self._lock:
            self._paused = True  # before the request: a process that starts from now on must not send requests
        self._call(Pause())

    def resume(self, version: int) -> None:
        """Let the trees continue with policy `version`. Raises RolloutError."""
        with self._lock:
            self._paused, self._version = False, version
        self._call(Resume(version))

    def close(self) -> None:
        """Disconnect; the process then stops all trees. A second call changes nothing."""
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

    def _give(self, tree_id: int, purpose: str, finished: Callable[[Task, RolloutTree], None] | None) -> None:
        """Call `finished` with a tree if it is of this purpose and was not collected."""
        with self._lock:
            tree, known = self._finished.get(tree_id), self._trees.get(tree_id)
        if finished is not None and tree is not None and known is not None and known[0].purpose == purpose:
            finished(known[0].task, tree)

    def _report(
        self,
        request: CollectTrees | StopTrees,
        progress: Callable[[RolloutProgress], None] | None = None,
        finished: Callable[[int], None] | None = None,
    ) -> RolloutReport:
        report = self._call(request, progress, finished)
        if not isinstance(report, RolloutReport):
            raise AssertionError(f"{request!r} was answered with {report!r}")
        shares = self._shares.setdefault(request.purpose, AnsweredShares()).add(report.calls)
        for tree in report.trees:
            tree.answered_shares = dict(shares)
        return report

    def _call(
        self,
        request: object,
        progress: Callable[[RolloutProgress], None] | None = None,
        finished: Callable[[int], None] | None = None,
    ) -> object:
        """Send a request and wait for its answer. If the connection is cut, the thread sends the request again."""
        with self._lock:
            if self._broken is not None:
                raise RolloutError(f"the rollout process has already failed: {self._broken}")
            request_id = next(self._requests)
            self._pending = (request_id, request)
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.send(self._pending)
        try:
            return self._answer_to(request_id, progress, finished)
        finally:
            with self._lock:
                self._pending = None

    def _answer_to(
        self,
        request_id: int,
        progress: Callable[[RolloutProgress], None] | None = None,
        finished: Callable[[int], None] | None = None,
    ) -> object:
        while True:
            answered_id, answer = self._answers.get()
            if isinstance(answer, FinishedTree):
                if finished is not None:
                    finished(answer.tree_id)
                continue
            if isinstance(answer, Failure):
                text = answer.user_error or f"the rollout process failed:\n{answer.traceback}"
                self._broken = RolloutError(text)
                raise UserError(text) if answer.user_error is not None else self._broken
            if isinstance(answer, RolloutError):
                self._broken = answer
                raise answer
            if answered_id != request_id:
                continue  # the answer to an interrupted call, or to the first request of another connection
            if isinstance(answer, StaleEnginesError):
                raise answer
            if not isinstance(answer, RolloutProgress):
                return answer
            if progress is not None:
                progress(answer)

    def _keep_connected(self) -> None:
        """Run the thread: read messages, and reconnect when the connection ends.

        It does not reconnect after a `Failure`, because the same trees might fail again.
        """
        failed = False
        try:
            while not (failed or self._closed.is_set()):
                connection = self._connect()
                with suppress(EOFError, OSError):
                    self._restore(connection)
                    while not failed:
                        failed = self._receive(connection.recv())
                with self._lock:
                    self._connection = None
                connection.close()
        except Exception as error:
            text = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
            self._answers.put((_GREETING, RolloutError(text)))

    def _connect(self) -> "Connection[object, object]":
        try:
            return connect(self._address, self._patience_s, self._closed)
        except OSError as error:
            raise RolloutError(f"the rollout process does not listen at {self._address}: {error.strerror}") from None

    def _restore(self, connection: "Connection[object, object]") -> None:
        """Send the unfinished trees and the pending request, for a process that was restarted."""
        with self._lock:
            self._connection, self._parts = connection, []
            if self._closed.is_set():
                raise EOFError
            trees = tuple(
                LiveTree(tree.tree_id, tree.purpose, tree.task, tree.step, tree.version, tree.settings, tuple(entries))
                for tree_id, (tree, entries) in self._trees.items()
                if tree_id not in self._collected
            )
            connection.send((_GREETING, Restore(self._settings, StartTrees(trees, self._version), self._paused)))
            if self._pending is not None:
                connection.send(self._pending)

    def _receive(self, message: object) -> bool:
        """Handle a message; return whether it was a `Failure`."""
        if self._pending is not None and isinstance(message, RecordEntry | FinishedTree):
            beat()  # only if rank 0 waits: trees that grow while it trains must not hide its hang
        if isinstance(message, RecordEntry):
            with self._lock:
                if message.tree_id in self._trees:
                    self._trees[message.tree_id][1].append(message.entry)
            return False
        if isinstance(message, FinishedTree):
            with self._lock:
                if message.tree_id in self._trees:
                    # A new process sends it again; the first object may be with a judge already.
                    self._finished.setdefault(message.tree_id, message.tree)
            self._answers.put((_GREETING, message))
            return False
        assert isinstance(message, tuple)
        request_id, answer = message
        if isinstance(answer, ReportPart):
            beat()
            self._parts.append(answer.tree)
            return False
        if isinstance(answer, RolloutReport):
            failed, self._parts = self._parts, []
            with self._lock:
                ids = [tree_id for tree_id in answer.tree_ids if tree_id in self._finished]
                trees = [self._finished.pop(tree_id) for tree_id in ids]
            answer = replace(answer, trees=trees, failed=failed)
        with self._lock:
            if isinstance(answer, RolloutReport):
                self._collected.update(tree_id for tree_id in answer.tree_ids if tree_id in self._trees)
            if self._pending is not None and self._pending[0] == request_id and not isinstance(answer, RolloutProgress):
                self._pending = None
        self._answers.put((request_id, answer))
        return isinstance(answer, Failure)
