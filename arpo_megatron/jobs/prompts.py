"""Prompts that depend on the tools of a job: their system prompt, and what the call protocol writes about the tools."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.inputs import training_prompt
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.environments.build import environment_maker, environment_prompt, fork_note
from arpo_megatron.tasks.files.mixture import change_tasks
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.protocols.build import make_protocol
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition
from arpo_megatron.tasks.system_prompts import system_prompt
from arpo_megatron.utils.atomic import atomic_write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def save_definitions(run: RunDirectory, tools: Sequence[ToolDefinition]) -> None:
    """Write the definitions of a job's tools to its run directory."""
    with atomic_write(run.tool_definitions) as partial:
        partial.write_text(json.dumps([asdict(tool) for tool in tools], indent=1) + "\n", encoding="utf-8")


def prompt_protocol(config: JobConfig, run: RunDirectory | None) -> CallProtocol:
    """Return the call protocol with the definitions of the run's tools, for prompts."""
    stored: Path | None = None if run is None else run.tool_definitions
    tools: tuple[ToolDefinition, ...] = DEFAULT_TOOLS
    if stored is not None and stored.is_file():
        tools = tuple(ToolDefinition(**values) for values in json.loads(stored.read_text(encoding="utf-8")))
    return make_protocol(config.rollout.protocol, tools)


def job_system_prompt(config: JobConfig, run: RunDirectory | None) -> str | None:
    """Return the system prompt of a job's tasks; None if its data have none. Raises UserError."""
    if config.rollout.system_prompt is None:
        return training_prompt(config)
    return system_prompt(config.rollout.system_prompt, prompt_protocol(config, run))


def environment_notes(config: JobConfig) -> list[str]:
    """Return lines for the user about the environment of a job."""
    named = config.rollout.environment
    note = None if named is None else fork_note(named, environment_maker(named, config.rollout.environment_params))
    return [] if note is None else [note]


def with_tool_prompts(
    tasks: Sequence[Task],
    config: JobConfig,
    run: RunDirectory | None,
    tokenizer: "PreTrainedTokenizerFast | None",
    system_name: str | None,
) -> Sequence[Task]:
    """Return tasks as the policy is prompted: in the form of the call protocol, or as their environment begins.

    Args:
        tasks: tasks as the data has them.
        config: the job.
        run: has the definitions of its tools (`save_definitions`); None: search and python.
        tokenizer: that of the model.
        system_name: as `rollout.system_prompt`; None: the tasks keep their own.

    Raises:
        UserError: there is no such system prompt, or the model has no chat template where the protocol needs one.
    """
    rollout = config.rollout
    if rollout.environment is not None:
        make_environment = environment_maker(rollout.environment, rollout.environment_params)
        return change_tasks(tasks, environment_prompt(make_environment, tokenizer))
    if rollout.protocol == "tags" and system_name is None:
        return tasks
    protocol = prompt_protocol(config, run)
    system = None if system_name is None else system_prompt(system_name, protocol)

    def prompted(task: Task) -> Task:
        messages = task.messages
        if system is not None:
            own = messages[1:] if messages[0]["role"] == "system" else messages
            first: Message = {"role": "system", "content": system}
            messages = (first, *own)
        return replace(task, messages=messages, prompt_text=protocol.prompt(messages, tokenizer))

    return change_tasks(tasks, prompted)
