"""A job's question files: prompts as the model gets them, lengths, bad rows, expected tokens."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.prompts import with_tool_prompts
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.workload import TYPICAL_FILL, typical
from arpo_megatron.tasks.base import BadRow, Task
from arpo_megatron.tasks.files.reader import read_tasks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN = 5
"""Prompts and bad rows that are shown."""
_BYTES_PER_TOKEN = 4.0
"""Bytes of English text per token, if there is no tokenizer. Assumption."""


def describe_data(
    config: JobConfig, run: RunDirectory | None, tokenizer: "PreTrainedTokenizerFast | None", *, every: bool = False
) -> Iterator[str]:
    """Yield the lines of `arpo data check`.

    Args:
        config: the job, with `data.path`.
        run: has the definitions of the job's tools; None: prompts describe search and python.
        tokenizer: that of `model.path`; None: lengths are estimated and no prompt is too long.
        every: show every bad row, not only the first ones.

    Raises:
        UserError: a file cannot be used.
    """
    read = read_tasks(config.data, tokenizer)
    tasks = with_tool_prompts(read.tasks, config, run, tokenizer, config.rollout.system_prompt)
    bad = read.bad_rows
    kinds = Counter(task.source for task in tasks)
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    yield f"{len(tasks)} questions ({named}), {len(bad)} bad row{'' if len(bad) == 1 else 's'}"
    yield from _bad_rows(bad, len(bad) if every else SHOWN)
    if tokenizer is None:
        yield "no prompt was compared with data.max_prompt_tokens, so a long one counts as usable: give model.path=DIR"
    yield from _lengths(config, tasks, tokenizer)
    yield _tokens(config)
    if tasks[0].messages[0]["role"] != "system":
        yield "no system prompt explains tools and format: rollout.system_prompt=tools (or arpo) adds one"
    for number in _spread(len(tasks)):
        task = tasks[number]
        yield f"\n--- {task.id}, {task.source}, answer {' or '.join(map(repr, task.answers))}"
        yield task.prompt_text


def _bad_rows(bad: Sequence[BadRow], shown: int) -> Iterator[str]:
    for row in bad[:shown]:
        yield f"  {row.where}: {row.reason}"
    if len(bad) > shown:
        yield f"  and {len(bad) - shown} more: --all shows them"


def _lengths(config: JobConfig, tasks: Sequence[Task], tokenizer: "PreTrainedTokenizerFast | None") -> Iterator[str]:
    if tokenizer is None:
        lengths = [len(task.prompt_text.encode()) / _BYTES_PER_TOKEN for task in tasks]
        note = f"estimated from {_BYTES_PER_TOKEN:g} bytes per token"
    else:
        lengths = [len(tokenizer.encode(task.prompt_text, add_special_tokens=False)) for task in tasks]
        note = f"data.max_prompt_tokens={config.data.max_prompt_tokens} limits those of the data, without tools"
    middle, high, top = np.percentile(lengths, (50, 95, 100))
    yield f"prompt tokens: median {middle:.0f}, 95 % have at most {high:.0f}, longest {top:.0f} ({note})"
    room = config.model.max_length - config.rollout.max_response_tokens
    if long := sum(length > room for length in lengths):
        yield (
            f"{long} prompts with system prompt and tools have more than {max(0, room)} tokens, which leaves less than "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} of model.max_length="
            f"{config.model.max_length}: raise model.max_length"
        )


def _tokens(config: JobConfig) -> str:
    step, work = config.train.tasks_per_step, typical(config)
    most = step * config.algorithm.group_size * config.rollout.max_response_tokens
    return (
        f"expected tokens of a step: {step * work.sampled:,.0f} sampled, {step * work.unique:,.0f} trained ({step} "
        f"questions x {config.algorithm.group_size} trajectories; assumes responses of {TYPICAL_FILL:.0%} of "
        f"rollout.max_response_tokens; at most {most:,} response tokens)"
    )


def _spread(count: int) -> list[int]:
    """Return up to `SHOWN` different numbers, spread over the whole file."""
    return sorted({round(number * (count - 1) / max(1, SHOWN - 1)) for number in range(SHOWN)})
