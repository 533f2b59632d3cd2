"""An environment of the `verifiers` package (its API `verifiers.v1`, from version 0.4)."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.environments.base import CORRECT, Step
from arpo_megatron.tasks.environments.verifiers.chat import UnreadableCallError, conversation, message_of, text_of
from arpo_megatron.tasks.environments.verifiers.process import VerifiersError, VerifiersProcess, process_of


@dataclass(slots=True)
class VerifiersEnvironment:
    """One episode of a verifiers environment, with the policy as its agent.

    The expected answer of a task is the task's number in the taskset, as `arpo data from-verifiers` writes it. The
    parts of the reward are those of the environment, with their weights, when the episode ends.
    """

    config: str
    """TOML file with the `[env]` block of a verifiers run: `taskset`, `id`, and a table for each agent."""
    python: str
    """Interpreter of the virtual environment in which verifiers and the environment are installed."""
    accuracy: str = ""
    """Reward that is the accuracy, if its value is between 0 and 1; "": the sum of all rewards, cut to [0, 1]."""
    replayable: bool = False
    """The environment is deterministic: equal turns of the model always have equal results. Then its trees fork."""
    _task: Task | None = field(default=None, init=False)
    _process: VerifiersProcess | None = field(default=None, init=False)
    _episode: str = field(default="", init=False)

    def __post_init__(self) -> None:
        for name, value in (("config", self.config), ("python", self.python)):
            if not Path(value).expanduser().is_file():
                raise ValueError(f"{name}={value}: no such file")

    def reset(self, task: Task) -> Sequence[Message]:
        """Return the conversation that the task's row has. The episode starts with the first action."""
        self._task = task
        return task.messages

    def step(self, action: str) -> Step:
        """Send the model's turn; return the messages of the environment, or the rewards.

        Raises:
            VerifiersError: the environment failed, or it begins the task differently from the row.
        """
        if self._process is None:
            self._begin()
        assert self._process is not None
        try:
            message = message_of(action)
        except UnreadableCallError as error:
            return Step(f"<tool_response>\nError: {error}\n</tool_response>")
        result = self._process.call("step", episode=self._episode, message=message)
        if result["done"]:
            return Step("", done=True, rewards=self._named(result["rewards"]))
        return Step(text_of(result["messages"]))

    def close(self) -> None:
        if self._process is not None:
            with suppress(VerifiersError):  # the process has ended, and its episodes with it
                self._process.send("close", episode=self._episode)
        self._process = None

    def _begin(self) -> None:
        assert self._task is not None
        index = _number(self._task)
        self._process, self._episode = worker_of(self.config, self.python), uuid.uuid4().hex
        first = self._process.call("reset", episode=self._episode, index=index)
        if first["done"] or tuple(conversation(first["messages"], first["tools"])) != self._task.messages:
            raise VerifiersError(
                f"task {self._task.ground_truth} begins differently from its row: write the file again with "
                "`arpo data from-verifiers`"
            )

    def _named(self, rewards: Mapping[str, float]) -> Mapping[str, float]:
        if not self.accuracy:
            return rewards
        if self.accuracy not in rewards:
            names = ", ".join(rewards) or "none"
            raise VerifiersError(f"accuracy={self.accuracy}: the environment's rewards are {names}")
        return {CORRECT if name == self.accuracy else name: value for name, value in rewards.items()}


def worker_of(config: str, python: str) -> VerifiersProcess:
    """Return the process that runs an environment's episodes."""
    return process_of(Path(python).expanduser().absolute(), Path(config).expanduser().absolute())


def _number(task: Task) -> int:
    if not task.ground_truth.isdecimal():
        raise VerifiersError(
            f"the expected answer of task {task.id} is {task.ground_truth!r}, not the number of a task of the taskset: "
            "write the file with `arpo data from-verifiers`"
        )
    return int(task.ground_truth)
