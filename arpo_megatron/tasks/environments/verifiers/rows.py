"""The tasks of a verifiers taskset as rows of a question file."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.environments.verifiers.chat import conversation
from arpo_megatron.tasks.environments.verifiers.environment import VerifiersEnvironment, worker_of
from arpo_megatron.tasks.environments.verifiers.process import VerifiersError

_AT_ONCE = 8
"""Episodes that are begun at a time."""


def task_rows(environment: VerifiersEnvironment, limit: int) -> Iterator[dict[str, Any]]:
    """Begin an episode of each of the first `limit` tasks, and yield its conversation and the task's number.

    Raises:
        UserError: the environment cannot be loaded, or does not begin a task.
    """
    process = worker_of(environment.config, environment.python)

    def row(index: int) -> dict[str, Any]:
        episode = uuid4().hex
        try:
            first = process.call("reset", episode=episode, index=index)
            if first["done"]:
                raise VerifiersError("the episode ends without a turn of the model")
            return {"prompt": conversation(first["messages"], first["tools"]), "answer": str(index)}
        except ValueError as error:
            raise VerifiersError(str(error)) from None
        finally:
            process.call("close", episode=episode)

    try:
        count = int(process.call("count", limit=limit)["count"])
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            yield from threads.map(row, range(count))
    except VerifiersError as error:
        raise UserError(f"{environment.config}: {error}") from None
