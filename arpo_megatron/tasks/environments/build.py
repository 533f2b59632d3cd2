"""Construction of the environment that a job names, and the prompts of its tasks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.registry import ExtensionPoint, load, make, params_of
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.chat import ChatTokenizer, chat_text
from arpo_megatron.tasks.environments.base import Environment, MakeEnvironment, can_fork


def environment_maker(name: str, params: Mapping[str, Any]) -> MakeEnvironment:
    """Return the function that makes an environment (`rollout.environment`).

    Raises:
        UserError: no package has it, it refuses a param, or it lacks a method.
    """
    known = params_of(load(ExtensionPoint.ENVIRONMENT, name))
    for param in params:
        if param not in known:
            raise UserError(
                f"rollout.environment_params: environment {name} has no {param!r}{did_you_mean(param, known)}; it has: "
                f"{', '.join(known) or 'none'}"
            )

    def made() -> Environment:
        environment: Environment = make(ExtensionPoint.ENVIRONMENT, name, params)
        return environment

    first = made()
    if missing := [part for part in ("reset", "step", "close") if not hasattr(first, part)]:
        raise UserError(f"environment {name} has no {', '.join(missing)}; docs/guides/environments.md shows one")
    try:
        first.close()
    except Exception as error:  # the environment is the user's: anything can go wrong in it
        raise UserError(f"environment {name}: close() failed: {error!r}") from error
    return made


def fork_note(name: str, make_environment: MakeEnvironment) -> str | None:
    """Return a line for the user if trees of an environment cannot fork."""
    environment = make_environment()
    environment.close()
    if can_fork(environment):
        return None
    return f"environment {name} has neither snapshots nor replay: its trees grow without forks"


def environment_prompt(make_environment: MakeEnvironment, tokenizer: ChatTokenizer | None) -> Callable[[Task], Task]:
    """Return the function that gives a task the conversation with which its environment begins.

    The function raises UserError if the environment cannot begin with the task.
    """

    def prompted(task: Task) -> Task:
        environment = make_environment()
        try:
            messages = tuple(environment.reset(task))
            text = chat_text(messages, tokenizer)
        except UserError:
            raise
        except Exception as error:  # the environment is the user's: anything can go wrong in it
            name = type(environment).__name__
            raise UserError(f"environment {name} cannot begin with task {task.id}: {error!r}") from error
        finally:
            environment.close()
        return replace(task, messages=messages, prompt_text=text)

    return prompted
