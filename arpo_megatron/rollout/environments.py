"""The environments of one tree: a state for each path, which a fork copies and compares.

A path keeps the environment that has executed its actions. A path that begins at a fork finds it in use by the measured
path. It then takes a new one and brings it to the state of the fork: from a snapshot, or by executing the recorded
actions of the path again. The snapshot of the new one must be that of the fork, and each observation that of the tree.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.rollout.node import Node
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.base import ENVIRONMENT, Environment, MakeEnvironment, Snapshots, Step, can_fork
from arpo_megatron.tree import ToolRecord

P = ParamSpec("P")
T = TypeVar("T")
_START: PathKey = ()


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

    async def step(self, node: Node, action: str) -> Step:
        """Execute the action that ended a MODEL segment, in the state of its path.

        Raises:
            EnvironmentStateError: the state before it cannot be restored, or a call exceeds its deadline.
        """
        before = node.callers(ENVIRONMENT, ())
        key = before[0].key if before else _START
        environment = self._live.pop(key, None) or await self._restored(key, before)
        try:
            step = await self._run(environment.step, action)
        except BaseException:
            self._close_later(environment)
            raise
        self._observations[node.key] = step.observation
        if step.done:
            await self._run(environment.close)
            return step
        if isinstance(environment, Snapshots):
            self._snapshots[node.key] = await self._run(environment.snapshot)
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
        await self._run(environment.reset, self.task)
        if not before:
            return
        if isinstance(environment, Snapshots) and (state := self._snapshots.get(key)) is not None:
            await self._run(environment.restore, state)
            if await self._run(environment.snapshot) != state:
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
        step = await self._run(environment.step, str(record.arguments["action"]))
        known = self._observations.setdefault(node.key, str(record.arguments["observation"]))
        if step.observation != known or step.done:
            raise EnvironmentStateError(
                f"an action has another observation when it is replayed: {step.observation[:80]!a}, not {known[:80]!a}"
            )
        if isinstance(environment, Snapshots):
            self._snapshots[node.key] = await self._run(environment.snapshot)

    async def _run(self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run a method of an environment in a thread."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.to_thread(call, *arguments, **keywords)
        except TimeoutError:
            raise EnvironmentStateError(f"the environment did not answer within {self.timeout_s:g} s") from None

    def _close_later(self, environment: Environment) -> None:
        """Close an environment of a failed path in a thread, since its call may still run."""
        asyncio.get_running_loop().run_in_executor(None, environment.close)

    def close(self) -> None:
        """Close the environments that no path uses."""
        for environment in self._live.values():
            environment.close()
        self._live.clear()
        self._snapshots.clear()


def step_record(action: str, step: Step, seconds: float) -> ToolRecord:
    """Return the record of an action."""
    values = {"action": action, "observation": step.observation, "done": step.done, "rewards": dict(step.rewards)}
    return ToolRecord(ENVIRONMENT, values, "ok", seconds, False)


def rewards_of(record: ToolRecord) -> Mapping[str, float] | None:
    """Return the rewards of an action, given its record; None for a call of another kind."""
    return record.arguments["rewards"] if record.name == ENVIRONMENT and record.status == "ok" else None


def ends_trajectory(record: ToolRecord) -> bool:
    """Return whether an action has ended the trajectory."""
    return record.name == ENVIRONMENT and bool(record.arguments.get("done"))
