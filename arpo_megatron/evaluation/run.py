"""`arpo eval`: answer questions, score the answers, save them as they arrive, and report."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.agents.base import Agent, PendingQuestion
from arpo_megatron.evaluation.agents.oracle import OracleAgent
from arpo_megatron.evaluation.benchmarks import HELD_OUT, Benchmark, select_benchmarks
from arpo_megatron.evaluation.contamination import TrainingQuestions, find_overlaps, questions_of, training_questions
from arpo_megatron.evaluation.journal import Attempt, Journal, write_records
from arpo_megatron.evaluation.notes import failure_warnings, file_notes, judge_note, missing_note, sampling_note
from arpo_megatron.evaluation.output import create_output, eval_identity, find_output
from arpo_megatron.evaluation.prompting import PromptedQuestions, prompt_benchmarks, prompt_held_out
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import Question, TestSet, read_all
from arpo_megatron.evaluation.report import SUMMARY, EvalResult, write_report
from arpo_megatron.evaluation.response import Response
from arpo_megatron.evaluation.score_queue import ScoreQueue
from arpo_megatron.evaluation.scorers import judge_check
from arpo_megatron.evaluation.summary import EvalSummary, summarize
from arpo_megatron.evaluation.target import EvalTarget, Setting, TargetKind, eval_config, parse_target
from arpo_megatron.jobs.inputs import load_tokenizer, training_prompt
from arpo_megatron.jobs.prompts import with_tool_prompts
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.monitor.wandb_run import add_evaluation
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.judge.judge import Judge
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.tasks.protocols.build import reading_protocol
from arpo_megatron.tasks.protocols.tools import tool_names
from arpo_megatron.tasks.system_prompts import ARPO_PROMPTS, RENDERED, read_prompt
from arpo_megatron.utils.atomic import write_json

_LOG_EVERY_S = 10.0
# TIR: tool-integrated reasoning.
_METHODS = {Tools.NONE: "no tools", Tools.PROMPT: "TIR prompting", Tools.TRAINED: "trained"}
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Arguments of `arpo eval`; see its --help."""

    target: str
    suite: str | None = None
    k: int = 1
    attempts: int | None = None
    tools: Tools | None = None
    data: Path = Path("data/eval")
    skip_missing: bool = False
    tasks: int | None = None
    model: str | None = None
    out: Path | None = None
    train_data: Path | None = None
    system_prompt: Path | None = None
    setting: Setting = Setting.RECIPES
    judge_all: bool = False
    overrides: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A request and everything that follows from it before the first attempt."""

    request: EvalRequest
    target: EvalTarget
    tools: Tools
    sets: Sequence[TestSet]
    """Questions of the benchmarks; empty for held-out tasks."""
    missing: Sequence[Benchmark]
    """Benchmarks without a file."""
    config: JobConfig
    attempts: int
    system: str | None
    """System prompt; None for the default."""
    out: RunDirectory
    log: Log


def evaluate(request: EvalRequest, log: Log = lambda _text: None) -> dict[str, Any]:
    """Answer, score and report. Attempts of an earlier process of the same evaluation are not repeated.

    Returns:
        the model, the output directory, and the metrics of each benchmark; the metrics of a single benchmark are also
        at the top level.

    Raises:
        UserError: an argument names something that does not exist or cannot be used.
        ProcessDiedError: the engine or the tool service did not start.
    """
    evaluation = _resolve(request, log)
    with evaluation.out.locked():
        with _prompted(evaluation) as (prompted, judge):
            training = _training_data(evaluation) if evaluation.sets else None
            overlapping = None if training is None else _overlapping(prompted, training)
            with closing(Journal(evaluation.out.path / "attempts.jsonl")) as journal:
                _answer(evaluation, prompted, journal, judged=judge is not None)
                attempts = journal.attempts()
        notes = [
            sampling_note(evaluation.target.name, evaluation.config),
            *prompted.notes,
            *file_notes(evaluation.sets),
            *missing_note(evaluation.missing, request.data),
        ]
        if request.tasks is not None:
            notes.append(f"only the first {request.tasks} questions of each benchmark")
        if training is not None and training.note:
            notes.append(training.note)
        notes += judge_note(judge)
        for warning in failure_warnings(attempts):
            log(f"warning: {warning}")
            notes.append(warning)
        return _report(evaluation, _summaries(evaluation, prompted, attempts, overlapping), notes, attempts)


def describe(request: EvalRequest, log: Log = lambda _text: None) -> list[str]:
    """Return what `evaluate` would do, one fact a line. Nothing is written. Raises UserError as `evaluate` does."""
    evaluation = _resolve(request, log, create=False)
    target, config = evaluation.target, evaluation.config
    tasks = config.evaluation.tasks if request.tasks is None else request.tasks
    asked = [f"{each.benchmark.name}: {len(each.questions[: request.tasks])} questions" for each in evaluation.sets]
    return [
        f"model {target.model or target.name}, {_METHODS[evaluation.tools]}",
        *(asked or [f"{HELD_OUT}: at most {tasks} questions"]),
        f"{evaluation.attempts} attempt(s) per question, pass@{request.k}",
        sampling_note(target.name, config),
        *missing_note(evaluation.missing, request.data),
        f"records in {evaluation.out.path}",
    ]


def _resolve(request: EvalRequest, log: Log, *, create: bool = True) -> _Evaluation:
    target = parse_target(request.target, request.model)
    tools = request.tools or (Tools.PROMPT if target.kind is TargetKind.SERVER else Tools.TRAINED)
    suite = request.suite or (HELD_OUT if target.kind is TargetKind.RUN else "")
    benchmarks, missing, sets = _test_sets(request, target, suite)
    config = eval_config(target, benchmarks, tools, list(request.overrides or ()), request.setting)
    if config.rollout.environment is not None and suite != HELD_OUT:
        raise UserError(f"rollout.environment={config.rollout.environment}: only --suite {HELD_OUT} has its tasks")
    _check_searchable(sets, config, target, tools)
    if request.judge_all:
        if config.reward.judge.url is None:
            raise UserError("--judge-all needs reward.judge.url=http://HOST:PORT/v1 and reward.judge.model=NAME")
        sets = [replace(each, benchmark=replace(each.benchmark, metric="judge")) for each in sets]
    if target.kind is TargetKind.SERVER and tools is not Tools.NONE and config.rollout.protocol != "tags":
        raise UserError(
            f"rollout.protocol={config.rollout.protocol}: a server is evaluated with tags only; evaluate the model's "
            "directory, or set rollout.protocol=tags"
        )
    if target.kind is TargetKind.SERVER and request.model is None:
        from arpo_megatron.evaluation.agents.server import served_model

        target = EvalTarget(target.kind, served_model(target.url, config, log), url=target.url)
    attempts = request.attempts or request.k
    if attempts < request.k:
        raise UserError(f"--attempts {attempts} is fewer than --k {request.k}")
    system = _system_prompt(request, target, config, trained=bool(benchmarks) and tools is Tools.TRAINED)
    identity = eval_identity(
        target, config, sets, suite=suite, tools=tools, tasks=request.tasks, attempts=attempts, system=system
    )
    path = find_output(identity, out=request.out, target=target)
    out = create_output(path, identity) if create else RunDirectory(path)
    return _Evaluation(request, target, tools, sets, missing, config, attempts, system, out, log)


def _test_sets(
    request: EvalRequest, target: EvalTarget, suite: str
) -> tuple[list[Benchmark], list[Benchmark], list[TestSet]]:
    """Return the benchmarks of the suite, those without a file, and the questions of the others."""
    if suite == HELD_OUT:
        if target.kind is not TargetKind.RUN:
            raise UserError(f"--suite {HELD_OUT}: {request.target} is not a run directory with held-out tasks")
        return [], [], []
    if not suite:
        raise UserError("--suite is missing: reasoning, deepsearch, or names of benchmarks")
    benchmarks = select_benchmarks(suite)
    sets, missing = read_all(benchmarks, request.data, skip_missing=request.skip_missing)
    return benchmarks, missing, sets


def _system_prompt(request: EvalRequest, target: EvalTarget, config: JobConfig, *, trained: bool) -> str | None:
    """Return the user's system prompt, or that of the training data of a trained run; None for the default."""
    if request.system_prompt is not None:
        return read_prompt(request.system_prompt, f"--system-prompt {request.system_prompt}")
    if request.setting is Setting.AUTHORS:
        return ARPO_PROMPTS["arpo_no_tools" if request.tools is Tools.NONE else "arpo"]
    return training_prompt(config) if trained and target.kind is TargetKind.RUN else None


@contextmanager
def _prompted(evaluation: _Evaluation) -> Iterator[tuple[PromptedQuestions, Judge | None]]:
    """Yield the questions and the judge, if there is one. Closing the judge releases the threads that wait for it."""
    config, target, tasks = evaluation.config, evaluation.target, evaluation.request.tasks
    judge, cache = None, config.reward.judge.cache or evaluation.out.judge_replies
    try:
        if evaluation.sets:
            if config.reward.judge.url is not None and any(e.benchmark.metric == "judge" for e in evaluation.sets):
                judge = Judge(config.reward.judge, cache, waiting="the evaluation", log=evaluation.log)
            check = None if judge is None else judge_check(judge, config.reward.judge.wording)
            yield (
                prompt_benchmarks(evaluation.sets, target, config, evaluation.tools, evaluation.system, check, tasks),
                judge,
            )
        else:
            reward = make_reward(
                config.reward,
                max_response_tokens=RolloutLimits.evaluation(config).max_response_tokens,
                protocol=reading_protocol(config.rollout),
                cache=cache,
                waiting="the evaluation",
                log=evaluation.log,
            )
            judge = reward.judge
            yield prompt_held_out(target, config, reward, tasks), judge
    finally:
        if judge is not None:
            judge.close()


def _answer(evaluation: _Evaluation, prompted: PromptedQuestions, journal: Journal, *, judged: bool) -> None:
    """Make the attempts that the journal lacks, and score saved answers that lack a verdict."""
    logged = time.monotonic()

    def progress(done: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > _LOG_EVERY_S:
            logged = time.monotonic()
            evaluation.log(f"{done} of {total} attempts")

    # Answers are saved only for a judge: scoring by rules takes no time.
    saved = [name for name, metric in prompted.metrics.items() if judged and metric not in ("math", "f1")]
    threads = evaluation.config.reward.judge.concurrency if judged else None  # each waits for a verdict
    with ScoreQueue(prompted.scorers, journal, saved, progress, threads) as queue:
        pending, unscored = [], list[tuple[Question, dict[int, Response]]]()
        for question, task in prompted.tasks:
            left = [n for n in range(evaluation.attempts) if not journal.done(question.benchmark, question.id, n)]
            if answers := queue.saved_answers(question, left):
                unscored.append((question, answers))
            if rest := tuple(n for n in left if n not in answers):
                pending.append(PendingQuestion(question, task, rest))
        to_make = sum(len(each.attempts) for each in pending)
        to_judge = sum(len(answers) for _, answers in unscored)
        total = to_make + to_judge
        if not total:
            return
        done = len(prompted.tasks) * evaluation.attempts - total
        counts = [f"{to_make} attempts to make"]
        counts += [f"{to_judge} to judge"] if to_judge else []
        counts += [f"{done} are done"] if done else []
        evaluation.log(f"{', '.join(counts)}; records in {evaluation.out.path}")
        for question, answers in unscored:
            queue.score(question, answers)
        if pending:
            with _agent(evaluation, prompted) as agent:
                agent.answer(_with_tools(pending, evaluation), queue.deliver)
        queue.finish()


def _with_tools(pending: Sequence[PendingQuestion], evaluation: _Evaluation) -> list[PendingQuestion]:
    """Return the questions with prompts that have the tools of the agent, whose definitions are known now."""
    target, config = evaluation.target, evaluation.config
    if evaluation.tools is Tools.NONE or target.is_oracle:
        return list(pending)
    named = None if evaluation.request.system_prompt is not None else config.rollout.system_prompt
    usual = config.rollout.protocol == "tags" and (config.rollout.tools is None or target.kind is TargetKind.RUN)
    if named is None and evaluation.system is None and evaluation.sets and not usual:
        named = RENDERED  # the default prompts explain tags, search and python
    asked = [each.task for each in pending]
    tokenizer = None if target.model is None else load_tokenizer(target.model)
    tasks = with_tool_prompts(asked, config, evaluation.out, tokenizer, named)
    return [replace(each, task=task) for each, task in zip(pending, tasks, strict=True)]


@contextmanager
def _agent(evaluation: _Evaluation, prompted: PromptedQuestions) -> Iterator[Agent]:
    """Start the services of an agent, and yield it."""
    from arpo_megatron.jobs.inputs import write_tool_files
    from arpo_megatron.launch.services import Job, running_services, tool_service
    from arpo_megatron.launch.tool_check import check_tools
    from arpo_megatron.rollout.endpoints import connect_rollouts

    target, config, out, tools = evaluation.target, evaluation.config, evaluation.out, evaluation.tools
    if target.is_oracle:
        yield OracleAgent(correct=target.kind is TargetKind.ORACLE)
        return
    for note in write_tool_files(config, out, prompted.data, target.run):
        evaluation.log(note)
    if tools is not Tools.NONE:
        for note in check_tools(config, out):
            evaluation.log(note)
    with Supervisor(out.logs) as supervisor:
        if target.kind is TargetKind.SERVER:
            from arpo_megatron.evaluation.agents.server import ServerAgent

            if tools is Tools.NONE:
                yield ServerAgent(target.url, target.name, config, tools, None, log=evaluation.log)
                return
            with tool_service(Job(config, out, supervisor)) as (sandbox_url, token):
                yield ServerAgent(target.url, target.name, config, tools, sandbox_url, token, evaluation.log)
            return
        from arpo_megatron.evaluation.agents.engine import EngineAgent

        assert target.model is not None and prompted.decode is not None
        with running_services(Job(config, out, supervisor), target.model) as ready:
            rollouts = connect_rollouts(config, target.model, ready)
            try:
                yield EngineAgent(rollouts, config, evaluation.attempts, prompted.decode, supervisor.check)
            finally:
                rollouts.close()


def _check_searchable(sets: Sequence[TestSet], config: JobConfig, target: EvalTarget, tools: Tools) -> None:
    """Raise UserError if a benchmark needs search and the model has no search tool, or one with nothing to search."""
    from arpo_megatron.jobs.inputs import JobData, write_tool_files

    names = [each.benchmark.name for each in sets if each.benchmark.needs_search]
    own_facts = target.kind is TargetKind.RUN and config.data.is_generated
    if not names or tools is Tools.NONE or target.is_oracle:
        return
    offered = tool_names(config.rollout.tools)
    if set(offered) <= {"python", "browse"}:
        raise UserError(
            f"{', '.join(names)} needs the search tool: set rollout.tools=[{', '.join(('search', *offered))}], or "
            "evaluate with --tools none"
        )
    if own_facts or "search" not in offered or config.sandbox.urls:  # another tool may search, or these are asked
        return
    with tempfile.TemporaryDirectory(prefix="arpo-eval-check-") as folder:
        write_tool_files(config, RunDirectory(Path(folder)), JobData((), ()), target.run)
        searchable = RunDirectory(Path(folder)).searchable
    if not searchable:
        raise UserError(
            f"{', '.join(names)}: the search tool has nothing to search: name a corpus or an engine in "
            "sandbox.file=FILE (docs/guides/tools.md), or evaluate with --tools none"
        )


def _training_data(evaluation: _Evaluation) -> TrainingQuestions | None:
    """Read the questions of the training data, if its file is known."""
    path, data = evaluation.request.train_data, evaluation.config.data
    if path is not None:
        evaluation.log(f"searching {path} for the questions")
        return training_questions(path, "--train-data ")
    if evaluation.target.run is None or data.is_generated:
        return None
    evaluation.log("searching the training data of the run for the questions")
    return questions_of(data)


def _overlapping(prompted: PromptedQuestions, training: TrainingQuestions) -> dict[str, set[str]]:
    """Return the ids of the questions found in the training data, by benchmark."""
    found: dict[str, set[str]] = {name: set() for name in prompted.scorers}
    for each in find_overlaps([question for question, _ in prompted.tasks], training.texts):
        found[each.question.benchmark].add(each.question.id)
    return found


def _summaries(
    evaluation: _Evaluation,
    prompted: PromptedQuestions,
    attempts: Sequence[Attempt],
    overlapping: Mapping[str, set[str]] | None,
) -> list[EvalSummary]:
    asked = {(question.benchmark, question.id) for question, _ in prompted.tasks}
    attempts = [attempt for attempt in attempts if (attempt.benchmark, attempt.question_id) in asked]
    return [
        summarize(
            [attempt for attempt in attempts if attempt.benchmark == name],
            metric=prompted.metrics[name],
            k=evaluation.request.k,
            seed=evaluation.config.seed,
            overlapping=None if overlapping is None else overlapping[name],
        )
        for name in prompted.scorers
    ]


def _report(
    evaluation: _Evaluation, summaries: Sequence[EvalSummary], notes: Sequence[str], attempts: Sequence[Attempt]
) -> dict[str, Any]:
    """Write records, summary and tables, and return the output of the command."""
    target, out = evaluation.target, evaluation.out.path
    rows = {row.benchmark: row.to_dict() for row in summaries}
    method = _METHODS[evaluation.tools]
    write_records(out / "records.parquet", attempts)
    write_json(out / SUMMARY, {"model": target.name, "method": method, "benchmarks": rows, "notes": notes})
    write_report(out, [EvalResult(target.name, method, rows, notes)])
    if target.run is not None and evaluation.config.monitor.wandb != "disabled":
        evaluation.log(add_evaluation(target.run.path, evaluation.config, rows))
    single = next(iter(rows.values())) if len(rows) == 1 else {}
    return {"model": str(target.model or target.name), "out": str(out), **single, "benchmarks": rows}
