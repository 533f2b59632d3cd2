"""The interface of an environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from arpo_megatron.tasks.base import Message, Task

ENVIRONMENT = "environment"
"""Name in the record of a call that is a turn of the model for its environment."""

CORRECT = "correct"
"""Part of the reward that is the accuracy, if the environment has one."""


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of an environment to an action."""

    observation: str
    """The text that the model reads next; unused if `done`."""
    done: bool = False
    """The trajectory ends."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward that this action earns. The reward of a trajectory is their sum over its actions."""


class Environment(Protocol):
    """The world of one trajectory. An implementation is a dataclass; its fields are `rollout.environment_params`.

    An object serves one trajectory: `reset` is its first call. Calls come one at a time, but from several threads.
    Trees fork only if the state can be copied: with the methods of `Snapshots`, or with `replayable`.
    """

    replayable: bool
    """Equal actions after a `reset` always lead to equal observations and an equal state. Without it: False."""

    def reset(self, task: Task) -> Sequence[Message]:
        """Begin a task; return the conversation before the model's first turn."""

    def step(self, action: str) -> Step:
        """Execute a turn of the model, the text without its end-of-sequence token."""

    def close(self) -> None:
        """Release resources. Also called after an error, and while a call that exceeded its deadline still runs."""


@runtime_checkable
class Snapshots(Protocol):
    """The optional methods of an environment whose state can be copied."""

    def snapshot(self) -> bytes:
        """Return the state. Equal states give equal bytes."""

    def restore(self, state: bytes) -> None:
        """Take a state that `snapshot` of another object has returned. Called after `reset` for the same task."""


def plain(answer: str) -> str:
    """Return an answer in the form in which the environments of the package compare it."""
    return answer.strip().casefold()


MakeEnvironment = Callable[[], Environment]


def can_fork(environment: Environment) -> bool:
    """Return whether a trajectory can be continued in a second environment."""
    return getattr(environment, "replayable", False) or isinstance(environment, Snapshots)
