"""The environments of one tree: a state for each path, which a fork copies and compares.

A path keeps the environment that has executed its actions. A path that begins at a fork finds it in use by the measured
path. It then takes a new one and brings it to the state of the fork: from a snapshot, or by executing the recorded
actions of the path again. The snapshot of the new one must be that of the fork, and each observation that of the tree.
A resumed run has no snapshots, only their digests: it executes the actions of every environment again.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.rollout.node import Node
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.base import ENVIRONMENT, Environment, MakeEnvironment, Snapshots, Step, can_fork
from arpo_megatron.tree import ToolRecord

P = ParamSpec("P")
T = TypeVar("T")
_START: PathKey = ()
_THREADS = ThreadPoolExecutor(64, "environment")
"""Threads of the environments of all trees. A call that hangs keeps its thread."""
_MOST_WAITS = 20
"""Time limits for which a call waits for a thread."""


class EnvironmentStateError(RuntimeError):
    """The state of an environment could not be copied: the trajectories of the tree would have different pasts."""


@dataclass(slots=True)
class TreeEnvironments:
    """The environments of a tree. Belongs to one event loop; their code runs in threads."""

    make: MakeEnvironment
    task: Task
    timeout_s: float
    """Deadline of one call."""
    _live: dict[PathKey, Environment] = field(default_factory=dict)
    """Environments that wait for the next action of a path, by the key of the last one."""
    _snapshots: dict[PathKey, bytes] = field(default_factory=dict)
    _observations: dict[PathKey, str] = field(default_factory=dict)
    """Observation after the action at a key, as the environment has returned it."""
    _calls: dict[int, Future[Any]] = field(default_factory=dict)
    """The last call of each environment, by the environment's id."""

    async def step(self, node: Node, action: str) -> Step:
        """Execute the action that ended a MODEL segment, in the state of its path.

        Raises:
            EnvironmentStateError: the state before it cannot be restored, or a call exceeds its deadline.
        """
        before = node.callers(ENVIRONMENT, ())
        key = before[0].key if before else _START
        environment = self._live.pop(key, None)
        if environment is None:
            environment = await self._restored(key, before)
        try:
            step = await self._run(environment, environment.step, action)
            if not all(map(math.isfinite, step.rewards.values())):
                raise ValueError(f"an environment returned a reward that is not finite: {dict(step.rewards)}")
        except BaseException:
            self._close_later(environment)
            raise
        self._observations[node.key] = step.observation
        if step.done:
            await self._run(environment, environment.close)
            return step
        if isinstance(environment, Snapshots):
            self._snapshots[node.key] = await self._run(environment, environment.snapshot)
        self._live[node.key] = environment
        return step

    async def _restored(self, key: PathKey, before: Sequence[Node]) -> Environment:
        """Return a new environment in the state after the actions of `before` (the nearest first)."""
        environment = self.make()
        try:
            await self._bring(environment, key, before)
        except BaseException:
            self._close_later(environment)
            raise
        return environment

    async def _bring(self, environment: Environment, key: PathKey, before: Sequence[Node]) -> None:
        """Bring a new environment to the state after the actions of `before`."""
        await self._run(environment, environment.reset, self.task)
        if not before:
            return
        if isinstance(environment, Snapshots) and (state := self._snapshots.get(key)) is not None:
            await self._run(environment, environment.restore, state)
            if await self._run(environment, environment.snapshot) != state:
                raise EnvironmentStateError("a restored environment has another snapshot than the one it restored")
            return
        if not can_fork(environment):
            raise EnvironmentStateError("the environment can neither be restored nor replayed")
        for each in reversed(before):
            await self._replay(environment, each)

    async def _replay(self, environment: Environment, node: Node) -> None:
        """Execute a recorded action again and compare what follows."""
        record = node.children[0].tool
        assert record is not None
        step = await self._run(environment, environment.step, str(record.arguments["action"]))
        known = self._observations.setdefault(node.key, str(record.arguments["observation"]))
        if step.observation != known or step.done:
            raise EnvironmentStateError(
                f"an action has another observation when it is replayed: {step.observation[:80]!a}, not {known[:80]!a}"
            )
        if dict(step.rewards) != record.arguments["rewards"]:
            raise EnvironmentStateError("an action has other rewards when it is replayed")
        if isinstance(environment, Snapshots):
            self._snapshots[node.key] = await self._run(environment, environment.snapshot)
            if self.state_digest(node.key) != record.arguments["state"]:
                raise EnvironmentStateError("an environment has another state when its actions are replayed")

    def state_digest(self, key: PathKey) -> str:
        """Return the SHA-256 of the snapshot after the action at a key; "" if there is none."""
        snapshot = self._snapshots.get(key)
        return "" if snapshot is None else hashlib.sha256(snapshot).hexdigest()

    async def _run(self, environment: Environment, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run a method of an environment in a thread. Its deadline begins when a thread is free."""
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def run() -> T:
            loop.call_soon_threadsafe(started.set)
            return call(*arguments, **keywords)

        self._calls[id(environment)] = future = _THREADS.submit(run)
        try:
            async with asyncio.timeout(_MOST_WAITS * self.timeout_s):
                await started.wait()
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            what = "the environment did not answer" if started.is_set() else "no thread was free for the environment"
            raise EnvironmentStateError(f"{what} within the time limit of {self.timeout_s:g} s") from None
        finally:
            future.cancel()  # only a call that has not begun

    def _close_later(self, environment: Environment) -> None:
        """Close an environment of a failed path in a thread, after its last call, which may still run."""
        last = self._calls.pop(id(environment), None)
        if last is None:
            _THREADS.submit(environment.close)
        else:
            last.add_done_callback(lambda _last: _THREADS.submit(environment.close))

    def close(self) -> None:
        """Close the environments that no path uses."""
        for environment in self._live.values():
            self._close_later(environment)
        self._live.clear()
        self._snapshots.clear()


def step_record(action: str, step: Step, seconds: float, state: str) -> ToolRecord:
    """Return the record of an action. `state` is the digest of the state after it."""
    values: dict[str, object] = {"action": action, "observation": step.observation, "done": step.done}
    values |= {"rewards": dict(step.rewards), "state": state}
    return ToolRecord(ENVIRONMENT, values, "ok", seconds, False)


def rewards_of(record: ToolRecord) -> Mapping[str, float] | None:
    """Return the rewards of an action, given its record; None for a call of another kind."""
    return record.arguments["rewards"] if record.name == ENVIRONMENT and record.status == "ok" else None


def ends_trajectory(record: ToolRecord) -> bool:
    """Return whether an action has ended the trajectory."""
    return record.name == ENVIRONMENT and bool(record.arguments.get("done"))
