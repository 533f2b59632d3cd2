"""Try components of your own without a job: rewards, tools, data readers, call protocols and environments.

from arpo_megatron.testing import call_tool, score_texts
assert call_tool(Convert(), length="3 km").text == "3000"
assert score_texts("./mine.py:score", "1+1?", "2", ["<answer>2</answer>"])[0].reward == 1.0
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from arpo_megatron.config import DataConfig, RewardConfig
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Response, ResponseGroup, Score
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.base import MakeEnvironment, Snapshots, Step, can_fork
from arpo_megatron.tasks.files.reader import FileTasks, read_tasks
from arpo_megatron.tasks.protocols.base import CallProtocol, Reading
from tools_sandbox.answers import ToolResult
from tools_sandbox.tool import Tool


def score_texts(
    kind: str, question: str, answer: str, texts: Sequence[str], *, source: str = "math", **params: float
) -> list[Score]:
    """Return the scores that a reward gives to responses of one task.

    Args:
        kind: `reward.kind`: a name, or FILE.py:NAME.
        question: text of the task.
        answer: expected answer.
        texts: responses, tags and tool results included.
        source: "math" or "qa".
        params: `reward.params`.

    Raises:
        UserError: there is no such reward, or it fails.
    """
    task = Task("task-0", ({"role": "user", "content": question},), answer, source, question)
    reward = make_reward(RewardConfig(kind=kind, params=params))
    return reward.score_group(ResponseGroup(task, [Response(text, calls=text.count("<result>")) for text in texts]))


def call_tool(tool: Tool, *, timeout_s: float = 30.0, **arguments: Any) -> ToolResult:
    """Check the arguments as the tool service does, and run the tool in this process.

    Raises:
        pydantic.ValidationError: the arguments do not fit the tool's model.
    """
    checked: BaseModel | Mapping[str, Any] = arguments
    if isinstance(tool.arguments, type):
        checked = tool.arguments.model_validate(arguments)
    return asyncio.run(tool.run(checked, timeout_s))


def read_questions(path: Path, **keys: Any) -> FileTasks:
    """Return the tasks and bad rows of a file; `keys` are those of section `data`, such as `reader` and `columns`.

    Raises:
        UserError: the file cannot be used.
    """
    return read_tasks(DataConfig(kind="files", path=path, **keys))


def read_call(protocol: CallProtocol, text: str, stop: str | None) -> Reading:
    """Return what a call protocol reads from a turn of the model that ended at `stop` (None: at its end)."""
    return asyncio.run(protocol.read_call(text, stop))


def play(make: MakeEnvironment, question: str, answer: str, actions: Sequence[str]) -> list[Step]:
    """Return the steps of actions in an environment, and check that a fork after each of them would continue alike.

    Args:
        make: the environment's class, or a function that makes one.
        question: text of the task.
        answer: expected answer.
        actions: turns of the model.

    Raises:
        AssertionError: the state cannot be copied, or a copy continues in another way.
    """
    task = Task("task-0", ({"role": "user", "content": question},), answer, "qa", question)
    first = make()
    assert can_fork(first), "the environment has neither snapshots nor replay"
    first.reset(task)
    steps: list[Step] = []
    for number, action in enumerate(actions):
        second = make()
        second.reset(task)
        if isinstance(first, Snapshots) and isinstance(second, Snapshots):
            state = first.snapshot()
            second.restore(state)
            assert second.snapshot() == state, f"the snapshot differs after it was restored, before action {number}"
        else:
            for earlier, known in zip(actions[:number], steps, strict=True):
                assert second.step(earlier) == known, f"{earlier!r} has another step when it is replayed"
        steps.append(first.step(action))
        assert second.step(action) == steps[-1], f"action {number}, {action!r}, has another step in a copy"
        second.close()
        if steps[-1].done:
            break
    first.close()
    return steps
