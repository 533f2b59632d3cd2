"""The grower in a process of its own, and the handle that trainer rank 0 holds on it.

An event loop with thousands of coroutines inside a training rank would delay its kernel launches and be delayed by
them. The process is `python -m arpo_megatron.rollout.worker`, started with one end of a socket pair; both ends speak
multiprocessing's `Connection`. (multiprocessing's own `spawn` would import the trainer's main module, torch and
Megatron with it, into that process.)
"""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.rollout.accounting import GrowStats
from arpo_megatron.rollout.grower import GrowLimits
from arpo_megatron.rollout.routes import RouteShape
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree

_CLOSE_DEADLINE_S = 5.0


class RolloutError(RuntimeError):
    """The rollout process failed in a way that is not a failed tree; the message holds its traceback or exit code."""


class StaleEnginesError(RuntimeError):
    """Engines (their URLs are the arguments) serve older weights than trees need: push, then ask again."""


@dataclass(frozen=True, slots=True)
class GrowSettings:
    """How the trees of one call are grown.

    Attributes:
        branching: the algorithm whose policy distributes the trajectories; None: independent ones.
        samples: trajectories a task where `branching` is None.
        temperature: sampling temperature, 0 is greedy.
        top_p: nucleus sampling.
        limits: bounds of a trajectory.
        routes: keep what the engine tells of expert routes, where it does (`ServiceSettings.routes`).
    """

    branching: AlgorithmConfig | None
    samples: int
    temperature: float
    top_p: float
    limits: GrowLimits
    routes: bool = False

    @classmethod
    def training(cls, config: JobConfig) -> Self:
        """A training step: the config's algorithm and temperature."""
        return cls(
            branching=config.algorithm,
            samples=config.algorithm.samples,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            limits=_limits(config),
            routes=True,
        )

    @classmethod
    def evaluation(cls, config: JobConfig, *, samples: int = 1, temperature: float | None = None) -> Self:
        """Independent trajectories at `temperature` (None: that of `config.evaluation`)."""
        return cls(
            branching=None,
            samples=samples,
            temperature=config.evaluation.temperature if temperature is None else temperature,
            top_p=1.0,
            limits=_limits(config),
        )


@dataclass(frozen=True, slots=True)
class GrowProgress:
    """How far a call has come. `trees_done` counts failed trees too."""

    trees_done: int
    trees_total: int
    tokens_sampled: int


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What a call has grown.

    Attributes:
        trees: the finished trees, in the order of their tasks.
        failed: (task id, reason) of every task whose tree could not be finished.
        stats: what it cost.
    """

    trees: list[RolloutTree]
    failed: list[tuple[str, str]]
    stats: GrowStats


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What the process needs to know once.

    Attributes:
        engine_urls: the SGLang servers.
        sandbox_url: the tool service.
        tokenizer_path: Hugging Face directory with the tokenizer.
        seed: the run's seed; branching draws follow from it.
        request_timeout_s: deadline of one engine request.
        retry_for_s: how long after its first failure a request or tool call is repeated.
        sandbox_token: the tool service's bearer token, if it has one.
        router_url: SGLang's router before the engines, if one runs.
        routes: what an engine's expert routes look like; None: it tells none.
    """

    engine_urls: tuple[str, ...]
    sandbox_url: str
    tokenizer_path: Path
    seed: int
    request_timeout_s: float = 600.0
    retry_for_s: float = 60.0
    sandbox_token: str | None = None
    router_url: str | None = None
    routes: RouteShape | None = None


@dataclass(frozen=True, slots=True)
class StartTrees:
    """Begin to grow a tree for each task.

    Attributes:
        group: trees that are collected together.
        tasks: ids may repeat only if equal trees' draws are wanted.
        step: keys the branching draws.
        version: of the weights that the engine holds now, at least.
        settings: how to grow.
    """

    group: str
    tasks: tuple[Task, ...]
    step: int
    version: int
    settings: GrowSettings


@dataclass(frozen=True, slots=True)
class CollectTrees:
    """Wait for `count` finished trees of a group (None: for all of it), and for all that began before a version.

    Those that began with the oldest version come first, and in the order of their start. More than `count` come only
    where more began before `finish_before`.
    """

    group: str
    count: int | None = None
    finish_before: int | None = None


@dataclass(frozen=True, slots=True)
class FinishTrees:
    """Wait until no tree of a group grows; they stay to be collected."""

    group: str


@dataclass(frozen=True, slots=True)
class StopTrees:
    """Give up all trees of a group that were not collected."""

    group: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Let no request pass to the engine and cut short those that run."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with policy `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way back.

    Attributes:
        traceback: the process's, as text.
        user_error: the one line of a `UserError`, None for other exceptions.
    """

    traceback: str
    user_error: str | None = None


class RolloutHandle:
    """Holds the rollout process. Not for several threads at once; also a context manager that closes it."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: "Connection[object, object]") -> None:
        self.process = process
        self._connection = connection
        self._calls = itertools.count()

    @classmethod
    def start(cls, settings: ServiceSettings, *, log_path: Path | None = None) -> Self:
        """Start the process; returns when it is ready to grow.

        Args:
            settings: addresses, tokenizer, seed.
            log_path: where its stdout and stderr go; None: to those of this process.

        Raises:
            UserError: `tokenizer_path` holds no tokenizer.json.
            RolloutError: the process could not start.
        """
        ours, theirs = socket.socketpair()
        output = None if log_path is None else log_path.open("ab")
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "arpo_megatron.rollout.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            theirs.close()
            if output is not None:
                output.close()
        handle = cls(process, Connection(ours.detach()))
        try:
            handle._send(settings)
            handle._receive()
        except BaseException:
            handle.close()
            raise
        return handle

    def grow(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        version: int,
        settings: GrowSettings,
        progress: Callable[[GrowProgress], None] | None = None,
    ) -> GrowReport:
        """Grow one tree for each task, all at once; blocks until the last one is finished or has failed.

        Args:
            tasks: see `StartTrees`, as for the next two.
            step: keys the branching draws.
            version: of the weights the engine holds, at least.
            settings: how to grow.
            progress: called now and then from this thread.

        Raises:
            RolloutError: the process broke down. A tree that cannot be finished is no error: see `GrowReport.failed`.
            StaleEnginesError: see `collect`.
        """
        group = f"call {next(self._calls)}"
        self.start_trees(StartTrees(group, tuple(tasks), step, version, settings))
        return self.collect(CollectTrees(group), progress)

    def start_trees(self, request: StartTrees) -> None:
        """Begin to grow; returns at once. The trees go on growing whatever else is called. Raises RolloutError."""
        self._call(request)

    def collect(self, request: CollectTrees, progress: Callable[[GrowProgress], None] | None = None) -> GrowReport:
        """Wait for finished trees.

        Raises:
            RolloutError: the process broke down.
            StaleEnginesError: an engine lacks the weights (it was restarted). The trees go on at the others; nothing
                was collected.
        """
        report = self._call(request, progress)
        if not isinstance(report, GrowReport):
            raise AssertionError(f"a collection was answered with {report!r}")
        return report

    def finish_trees(self, request: FinishTrees, progress: Callable[[GrowProgress], None] | None = None) -> None:
        """Wait for all trees of a group. Raises what `collect` does."""
        self._call(request, progress)

    def stop_trees(self, request: StopTrees) -> None:
        """Give up trees. Raises RolloutError."""
        self._call(request)

    def pause(self) -> None:
        """Stop all trees where they are; the engine is idle when this returns. Raises RolloutError."""
        self._call(Pause())

    def resume(self, version: int) -> None:
        """Let the trees go on with policy `version`. Raises RolloutError."""
        self._call(Resume(version))

    def close(self) -> None:
        """End the process, within 5 seconds; a second call changes nothing."""
        self._connection.close()  # the process ends when it reads the end of the stream
        try:
            self.process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _call(self, request: object, progress: Callable[[GrowProgress], None] | None = None) -> object:
        """Send a request and wait for its answer."""
        self._send(request)
        while isinstance(answer := self._receive(), GrowProgress):
            if progress is not None:
                progress(answer)
        return answer

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> object:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, StaleEnginesError):
            raise answer
        if isinstance(answer, Failure) and answer.user_error is not None:
            raise UserError(answer.user_error)
        if isinstance(answer, Failure):
            raise RolloutError(f"the rollout process failed:\n{answer.traceback}")
        return answer

    def _ended(self) -> RolloutError:
        try:
            code: int | None = self.process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = None
        return RolloutError(f"the rollout process ended with code {code}")


def _limits(config: JobConfig) -> GrowLimits:
    rollout = config.rollout
    return GrowLimits(
        max_length=config.model.max_length,
        max_response_tokens=rollout.max_response_tokens,
        max_tool_calls=rollout.max_tool_calls,
        max_tool_tokens=rollout.max_tool_tokens,
        tool_timeout_s=rollout.tool_timeout_s,
        stop_at_answer=rollout.stop_at_answer,
        sessions=config.sandbox.sessions,
    )
