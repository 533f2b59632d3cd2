"""A population of system prompts: each task gets one, better ones more often, and bad ones leave."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.selectors.base import EpochSelector
from arpo_megatron.tasks.system_prompts import read_prompt

_MARK = "#prompt"
_SEPARATOR = "\n---\n"


@dataclass(slots=True)
class PromptPopulation:
    """Draw tasks in epochs, each with a system prompt j from a file, drawn with p_j ~ exp(w_j / prompt_temperature).

    INSPO (arXiv 2512.01945): w_j is the running mean of what trees with prompt j have earned, and after every
    `prompt_every` trees the prompt with the lowest w_j leaves, until `prompt_keep` remain. Here that is the mean
    accuracy of a tree. New prompts, which the paper generates from failures by reflection, are not implemented. The
    widths of the running mean, the interval and the temperature are ours. Held-out tasks keep the system prompt of the
    job; `selector/prompt_J` shows which prompt to set there (`rollout.system_prompt`). A tree's task id shows its
    prompt, `train-204#prompt3`.
    Experimental: the sampling rule comes from public notes on the paper.
    """

    tasks: Sequence[Task]
    """All tasks."""
    seed: int
    """Seed of the epochs' orders and of the draws."""
    prompt_file: str = ""
    """UTF-8 text file with the prompts, separated by lines of three hyphens; required."""
    prompt_temperature: Annotated[float, Field(gt=0)] = 0.1
    """tau_s."""
    prompt_memory: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Weight of a new tree in the running mean."""
    prompt_every: Annotated[int, Field(gt=0)] = 256
    """Trees between two removals."""
    prompt_keep: Annotated[int, Field(gt=0)] = 2
    """Number of prompts that stay."""
    _epochs: EpochSelector = field(init=False)
    _prompts: list[str] = field(init=False)
    _weights: dict[int, float] = field(init=False)
    _drawn: int = field(default=0, init=False)
    _results: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochSelector(self.tasks, self.seed)
        if not self.prompt_file:
            raise UserError("algorithm.selector=prompts needs a file of prompts: set algorithm.params.prompt_file")
        text = read_prompt(Path(self.prompt_file), f"algorithm.params.prompt_file={self.prompt_file}")
        self._prompts = [part.strip() for part in f"\n{text}\n".split(_SEPARATOR) if part.strip()]
        if len(self._prompts) < 2:
            raise UserError(
                f"algorithm.params.prompt_file={self.prompt_file} needs two prompts, separated by a line ---"
            )
        self._weights = dict.fromkeys(range(len(self._prompts)), 0.0)

    def next_batch(self, count: int, begun: Collection[str] = ()) -> list[Task]:
        """Return the next tasks of the epochs with their prompts; see `TaskSelector`."""
        tasks = self._epochs.next_batch(count, [name.rpartition(_MARK)[0] for name in begun])
        chosen = []
        for task in tasks:
            draw = random.Random(f"prompt-{self.seed}-{self._drawn}")
            self._drawn += 1
            top = max(self._weights.values())
            chances = [exp((weight - top) / self.prompt_temperature) for weight in self._weights.values()]
            (prompt,) = draw.choices(list(self._weights), chances)
            chosen.append(self.variant(f"{task.id}{_MARK}{prompt}"))
        return chosen

    def record_result(self, task_id: str, accuracies: Sequence[float]) -> None:
        """Attribute the mean accuracy of a tree to its prompt, and remove the worst prompt when it is time."""
        prompt = int(task_id.rpartition(_MARK)[2])
        if not accuracies or prompt not in self._weights:
            return
        mean = sum(accuracies) / len(accuracies)
        self._weights[prompt] += self.prompt_memory * (mean - self._weights[prompt])
        self._results += 1
        if self._results % self.prompt_every == 0 and len(self._weights) > self.prompt_keep:
            del self._weights[min(self._weights, key=lambda number: self._weights[number])]

    def variant(self, task_id: str) -> Task:
        """Return the task with its prompt; KeyError for an unknown task."""
        name, _, prompt = task_id.rpartition(_MARK)
        task = self.tasks[self._epochs.number_of(name)]
        return replace(with_system_prompt(task, self._prompts[int(prompt)]), id=task_id)

    def metrics(self) -> Mapping[str, float]:
        """Return the weight of each prompt that has not left."""
        return {f"selector/prompt_{number}": weight for number, weight in self._weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the order, and the population."""
        weights = [[number, weight] for number, weight in self._weights.items()]
        population = {"prompts": self._prompts, "weights": weights, "drawn": self._drawn, "results": self._results}
        return {**self._epochs.state_dict(), "population": population}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises UserError for that of other tasks, another seed or another file."""
        self._epochs.load_state_dict(state)
        population = state.get("population")
        if population is None or population["prompts"] != self._prompts:
            raise UserError("the checkpoint was made with other prompts in algorithm.params.prompt_file: restore them")
        self._weights = {int(number): weight for number, weight in population["weights"]}
        self._drawn, self._results = population["drawn"], population["results"]


def with_system_prompt(task: Task, text: str) -> Task:
    """Return the task with another system prompt.

    Raises:
        UserError: the task has none, or its prompt does not contain it as it is written.
    """
    own = task.messages[0]["content"].strip() if task.messages and task.messages[0]["role"] == "system" else ""
    place = task.prompt_text.find(own) if own else -1
    if place < 0:
        raise UserError(
            f"the prompt of {task.id} contains no system prompt that could be replaced: set rollout.system_prompt"
        )
    first: Message = {"role": "system", "content": text}
    prompt = f"{task.prompt_text[:place]}{text}{task.prompt_text[place + len(own) :]}"
    return replace(task, messages=(first, *task.messages[1:]), prompt_text=prompt)
