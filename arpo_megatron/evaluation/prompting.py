"""Questions as they are prompted to a model, and how their answers are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import HELD_OUT
from arpo_megatron.evaluation.held_out import held_out_question
from arpo_megatron.evaluation.prompts import Tools, messages
from arpo_megatron.evaluation.questions import Question, TestSet
from arpo_megatron.evaluation.response import Decode
from arpo_megatron.evaluation.scorers import AnswerCheck, Scorer, benchmark_scorer, held_out_scorer
from arpo_megatron.evaluation.target import EvalTarget, TargetKind
from arpo_megatron.jobs.inputs import JobData, load_data, load_tokenizer
from arpo_megatron.rewards.base import Reward
from arpo_megatron.tasks.arpo_parquet import chat_text, read_parquet
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic import lookup as generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class PromptedQuestions:
    """What is asked.

    Attributes:
        asked: questions with the tasks that stand for them.
        scorers: by benchmark, in the order of the report.
        metrics: what each of these scores is.
        decode: token ids -> text, where an engine of ours answers.
        data: what the tool service is made for.
        notes: what a reader of the results must know.
    """

    asked: Sequence[tuple[Question, Task]]
    scorers: Mapping[str, Scorer]
    metrics: Mapping[str, str]
    decode: Decode | None = None
    data: JobData = field(default_factory=lambda: JobData((), ()))
    notes: Sequence[str] = ()


def prompt_held_out(target: EvalTarget, config: JobConfig, reward: Reward, tasks: int | None) -> PromptedQuestions:
    """The held-out tasks of a run, scored by its reward. Raises UserError where there are fewer than asked for."""
    assert target.model is not None
    tokenizer = load_tokenizer(target.model)
    data = load_data(config, tokenizer)
    if tasks is not None and tasks > len(data.held_out):
        raise UserError(f"--tasks {tasks}: the run has {len(data.held_out)} held-out tasks")
    held_out = data.held_out[: tasks or config.evaluation.tasks]
    scorer = held_out_scorer(reward, held_out, config.reward.success_threshold)
    return PromptedQuestions(
        asked=[(held_out_question(task), task) for task in held_out],
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
    """The questions of benchmarks, the first `tasks` of each where that is given.

    A run on generated tasks is asked as it was trained, without a chat around the question, unless a system prompt is
    given.
    """
    tokenizer = load_tokenizer(target.model) if target.model is not None else None
    bare = target.kind is TargetKind.RUN and config.data.is_generated and system is None
    asked = []
    for each in sets:
        source = "math" if each.benchmark.metric == "math" else "qa"
        for question in each.questions[:tasks]:
            turns = messages(question.text, tools, system)
            text = generated.prompt(question.text) if bare else chat_text(turns, tokenizer)
            asked.append((question, Task(question.id, turns, question.answers[0], source, text)))
    notes = ["asked in the form of the generated tasks that the run was trained on"] if bare else []
    unjudged = [each.benchmark.name for each in sets if each.benchmark.metric == "judge" and judge is None]
    if unjudged:
        notes.append(f"no judge (reward.judge.url), so by token F1 instead: {', '.join(unjudged)}")
    return PromptedQuestions(
        asked=asked,
        scorers={each.benchmark.name: benchmark_scorer(each.benchmark.metric, tools, judge) for each in sets},
        metrics={
            each.benchmark.name: "f1" if each.benchmark.name in unjudged else each.benchmark.metric for each in sets
        },
        decode=None if tokenizer is None else _decoder(tokenizer),
        data=load_data(config, tokenizer) if bare and tokenizer is not None else JobData((), ()),
        notes=notes,
    )


def training_prompt(config: JobConfig) -> str | None:
    """The system prompt of the questions that a run was trained on; None where they have none, or differ in form."""
    if config.data.kind != "arpo_parquet" or config.data.path is None:
        return None
    first = read_parquet(config.data.path).tasks[0].messages[0]
    return first["content"] if first["role"] == "system" else None


def _decoder(tokenizer: "PreTrainedTokenizerFast") -> Decode:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
