"""Questions with their prompts and scorers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import HELD_OUT
from arpo_megatron.evaluation.prompts import Tools, messages
from arpo_megatron.evaluation.questions import Question, TestSet
from arpo_megatron.evaluation.response import Decode
from arpo_megatron.evaluation.scorers import AnswerCheck, Scorer, benchmark_scorer, held_out_scorer
from arpo_megatron.evaluation.target import EvalTarget, TargetKind
from arpo_megatron.jobs.inputs import JobData, load_data, load_tokenizer
from arpo_megatron.rewards.base import Reward
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.chat import chat_text
from arpo_megatron.tasks.protocols.build import reading_protocol
from arpo_megatron.tasks.synthetic import lookup as generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class PromptedQuestions:
    """Questions of an evaluation with prompts, scorers and the data of the tool service."""

    tasks: Sequence[tuple[Question, Task]]
    """Each question, and the task with its prompt."""
    scorers: Mapping[str, Scorer]
    """Scorer by benchmark, in the order of the report."""
    metrics: Mapping[str, str]
    """Meaning of a score, by benchmark."""
    decode: Decode | None = None
    """Token ids to text, if an engine answers."""
    data: JobData = field(default_factory=lambda: JobData((), ()))
    """Data that the tool service serves."""
    notes: Sequence[str] = ()


def prompt_held_out(target: EvalTarget, config: JobConfig, reward: Reward, tasks: int | None) -> PromptedQuestions:
    """Return the held-out tasks of a run, scored by its reward.

    Raises:
        UserError: the run has fewer than `tasks`.
    """
    assert target.model is not None
    tokenizer = load_tokenizer(target.model)
    data = load_data(config, tokenizer)
    if tasks is not None and tasks > len(data.held_out):
        raise UserError(f"--tasks {tasks}: the run has {len(data.held_out)} held-out tasks")
    held_out = data.held_out[: tasks or config.evaluation.tasks]
    scorer = held_out_scorer(reward, held_out, config.reward.success_threshold)
    return PromptedQuestions(
        tasks=[(Question(HELD_OUT, task.id, task.messages[-1]["content"], task.answers), task) for task in held_out],
        scorers={HELD_OUT: scorer},
        metrics={HELD_OUT: f"reward {config.reward.kind}"},
        decode=_decoder(tokenizer),
        data=data,
    )


def prompt_benchmarks(
    sets: Sequence[TestSet],
    target: EvalTarget,
    config: JobConfig,
    tools: Tools,
    system: str | None,
    judge: AnswerCheck | None,
    tasks: int | None,
) -> PromptedQuestions:
    """Return the questions of benchmarks, or the first `tasks` of each.

    A run on generated tasks gets the bare prompt that it was trained on, unless there is a system prompt.
    """
    protocol = reading_protocol(config.rollout)
    tokenizer = load_tokenizer(target.model) if target.model is not None else None
    bare = target.kind is TargetKind.RUN and config.data.is_generated and system is None
    prompted = []
    for each in sets:
        source = "math" if each.benchmark.metric == "math" else "qa"
        for question in each.questions[:tasks]:
            turns = messages(question.text, tools, system)
            text = generated.prompt(question.text) if bare else chat_text(turns, tokenizer)
            prompted.append((question, Task(question.id, turns, question.answers[0], source, text)))
    notes = ["prompted in the form of the generated tasks that the run was trained on"] if bare else []
    unjudged = [each.benchmark.name for each in sets if each.benchmark.metric == "judge" and judge is None]
    if unjudged:
        notes.append(f"no judge (reward.judge.url), so scored by token F1: {', '.join(unjudged)}")
    return PromptedQuestions(
        tasks=prompted,
        scorers={each.benchmark.name: benchmark_scorer(each.benchmark.metric, tools, judge, protocol) for each in sets},
        metrics={
            each.benchmark.name: "f1" if each.benchmark.name in unjudged else each.benchmark.metric for each in sets
        },
        decode=None if tokenizer is None else _decoder(tokenizer),
        data=load_data(config, tokenizer) if bare and tokenizer is not None else JobData((), ()),
        notes=notes,
    )


def _decoder(tokenizer: "PreTrainedTokenizerFast") -> Decode:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
