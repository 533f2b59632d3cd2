"""`arpo eval`: questions answered, scored, kept as they come, and reported."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation import contamination as overlap
from arpo_megatron.evaluation import report
from arpo_megatron.evaluation.agents.base import Agent, PendingQuestion
from arpo_megatron.evaluation.agents.oracle import OracleAgent
from arpo_megatron.evaluation.benchmarks import HELD_OUT, Benchmark, select_benchmarks
from arpo_megatron.evaluation.journal import TRANSIENT, Attempt, Journal, Outcome, write_records
from arpo_megatron.evaluation.output import eval_identity, open_output
from arpo_megatron.evaluation.prompting import PromptedQuestions, prompt_benchmarks, prompt_held_out, training_prompt
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import Question, TestSet, read_all
from arpo_megatron.evaluation.response import Response
from arpo_megatron.evaluation.score_queue import ScoreQueue
from arpo_megatron.evaluation.scorers import judge_check
from arpo_megatron.evaluation.summary import EvalSummary, summarize
from arpo_megatron.evaluation.target import EvalTarget, TargetKind, eval_config, parse_target
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.judge.judge import Judge
from arpo_megatron.utils.atomic import write_json
from tools_sandbox.config import TOKEN_VARIABLE

_NOTE_EVERY_S = 10.0
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What the command line asks for; see `arpo eval --help`."""

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
    overrides: Sequence[str] = field(default_factory=tuple)


def evaluate(request: EvalRequest, tell: Tell = lambda _text: None) -> dict[str, Any]:
    """Answer, score and report; what an earlier process of the same evaluation has done is not done again.

    Returns:
        the model, the directory with the records, and a row of figures for each benchmark; for one benchmark its
        figures stand beside them too.

    Raises:
        UserError: something that is named does not exist or cannot be used.
        ProcessDiedError: the engine or the tool service did not start.
    """
    target = parse_target(request.target, request.model)
    tools = request.tools or (Tools.PROMPT if target.kind is TargetKind.SERVER else Tools.TRAINED)
    suite = request.suite or (HELD_OUT if target.kind is TargetKind.RUN else "")
    benchmarks, missing, sets = _sets(target, suite, request)
    config = eval_config(target, benchmarks, tools, list(request.overrides))
    target = _named(target, request, config, tell)
    attempts = request.attempts or request.k
    if attempts < request.k:
        raise UserError(f"--attempts {attempts} is fewer than --k {request.k}")
    system = _system_prompt(request, target, config, bool(benchmarks) and tools is Tools.TRAINED)
    identity = eval_identity(
        target,
        config,
        sets,
        suite=suite,
        tools=tools,
        tasks=request.tasks,
        attempts=attempts,
        system=system,
    )
    out = open_output(identity, out=request.out, target=target)
    with out.locked():
        with _asked(request, target, config, tools, system, out, sets, tell) as (prompted, judge):
            training = _training_data(request, target, config, tell) if sets else None
            held = None if training is None else _held(prompted, training)
            journal = Journal(out.path / "attempts.jsonl")
            try:
                _answer(target, config, tools, out, prompted, journal, attempts, judge is not None, tell)
                kept = journal.attempts()
            finally:
                journal.close()
        figures = _figures(request, config, prompted, kept, held)
        notes = [*_notes(prompted, sets, missing, request, training), *_judging(judge)]
        return _report(out, target, tools, config, figures, notes, kept, tell)


@contextmanager
def _asked(
    request: EvalRequest,
    target: EvalTarget,
    config: JobConfig,
    tools: Tools,
    system: str | None,
    out: RunDirectory,
    sets: Sequence[TestSet],
    tell: Tell,
) -> Iterator[tuple[PromptedQuestions, Judge | None]]:
    """What is asked, and the model that judges answers, if one does.

    That is closed at the end of the block, however this is left: whoever waits for it is let go then.
    """
    judge, cache = None, config.reward.judge.cache or out.judge_replies
    try:
        if sets:
            if config.reward.judge.url is not None and any(each.benchmark.metric == "judge" for each in sets):
                judge = Judge(config.reward.judge, cache, waiting="the evaluation", log=tell)
            verdicts = None if judge is None else judge_check(judge)
            prompted = prompt_benchmarks(sets, target, config, tools, system, verdicts, request.tasks)
        else:
            limit = config.rollout.max_response_tokens
            reward = make_reward(
                config.reward, max_response_tokens=limit, cache=cache, waiting="the evaluation", log=tell
            )
            judge = reward.judge
            prompted = prompt_held_out(target, config, reward, request.tasks)
        yield prompted, judge
    finally:
        if judge is not None:
            judge.close()


def _sets(
    target: EvalTarget, suite: str, request: EvalRequest
) -> tuple[list[Benchmark], list[Benchmark], list[TestSet]]:
    """The benchmarks of a suite, those whose file is missing, and the files of the others."""
    if suite == HELD_OUT:
        if target.kind is not TargetKind.RUN:
            raise UserError(f"--suite {HELD_OUT}: only a run directory has held-out tasks")
        return [], [], []
    if not suite:
        raise UserError("--suite is missing: reasoning, deepsearch, or names of benchmarks")
    benchmarks = select_benchmarks(suite)
    sets, missing = read_all(benchmarks, request.data, skip_missing=request.skip_missing)
    return benchmarks, missing, sets


def _named(target: EvalTarget, request: EvalRequest, config: JobConfig, tell: Tell) -> EvalTarget:
    """With the name of the model that a server has."""
    if target.kind is not TargetKind.SERVER or request.model is not None:
        return target
    from arpo_megatron.evaluation.agents.server import served_model

    return EvalTarget(target.kind, served_model(target.url, config, tell), url=target.url)


def _system_prompt(request: EvalRequest, target: EvalTarget, config: JobConfig, trained: bool) -> str | None:
    """The user's, or for a trained model that of its training data; None: our own wording."""
    if request.system_prompt is not None:
        try:
            return request.system_prompt.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UserError(f"--system-prompt {request.system_prompt}: {error.strerror}") from None
    return training_prompt(config) if trained and target.kind is TargetKind.RUN else None


def _answer(
    target: EvalTarget,
    config: JobConfig,
    tools: Tools,
    out: RunDirectory,
    prompted: PromptedQuestions,
    journal: Journal,
    attempts: int,
    judged: bool,
    tell: Tell,
) -> None:
    """Have all attempts made that the journal does not hold, and those scored that only want a verdict."""
    told = time.monotonic()

    def note(done: int) -> None:
        nonlocal told
        if time.monotonic() - told > _NOTE_EVERY_S:
            told = time.monotonic()
            tell(f"{done} of {total} attempts")

    # Only a model's verdict is worth keeping what it is asked about: rules take no time.
    kept = [name for name, metric in prompted.metrics.items() if judged and metric not in ("math", "f1")]
    at_once = config.reward.judge.concurrency if judged else None  # a thread each: it waits for the verdict
    with ScoreQueue(prompted.scorers, journal, kept, note, at_once) as scoring:
        wanted, unscored = [], list[tuple[Question, dict[int, Response]]]()
        for question, task in prompted.asked:
            left = [n for n in range(attempts) if not journal.done(question.benchmark, question.id, n)]
            if answers := scoring.kept(question, left):
                unscored.append((question, answers))
            if rest := tuple(n for n in left if n not in answers):
                wanted.append(PendingQuestion(question, task, rest))
        to_make = sum(len(each.attempts) for each in wanted)
        to_judge = sum(len(answers) for _, answers in unscored)
        total = to_make + to_judge
        if not total:
            return
        known = len(prompted.asked) * attempts - total
        said = [f"{to_make} attempts to make", *([f"{to_judge} to judge"] if to_judge else [])]
        tell(f"{', '.join(said)}{f', {known} are there already' if known else ''}; records in {out.path}")
        for question, answers in unscored:
            scoring.score(question, answers)
        if wanted:
            with _agent(target, config, tools, out, prompted, attempts, tell) as agent:
                agent.answer(wanted, scoring.deliver)
        scoring.finish()


@contextmanager
def _agent(
    target: EvalTarget,
    config: JobConfig,
    tools: Tools,
    out: RunDirectory,
    prompted: PromptedQuestions,
    attempts: int,
    tell: Tell,
) -> Iterator[Agent]:
    """Whoever answers, with the services that this needs."""
    from arpo_megatron.jobs.inputs import write_tool_files
    from arpo_megatron.launch.services import services, tool_service
    from arpo_megatron.rollout.endpoints import connect_rollouts

    if target.kind in (TargetKind.ORACLE, TargetKind.WRONG):
        yield OracleAgent(right=target.kind is TargetKind.ORACLE)
        return
    write_tool_files(config, out, prompted.data)
    with Supervisor(out.logs) as supervisor:
        if target.kind is TargetKind.SERVER:
            from arpo_megatron.evaluation.agents.server import ServerAgent

            token = os.environ.get(TOKEN_VARIABLE) or None
            if tools is Tools.NONE:
                yield ServerAgent(target.url, target.name, config, tools, None, tell=tell)
                return
            with tool_service(config, out, supervisor) as sandbox_url:
                yield ServerAgent(target.url, target.name, config, tools, sandbox_url, token, tell)
            return
        from arpo_megatron.evaluation.agents.engine import EngineAgent

        assert target.model is not None and prompted.decode is not None
        with services(config, out, supervisor, target.model) as ready:
            rollouts = connect_rollouts(config, target.model, ready)
            try:
                yield EngineAgent(rollouts, config, attempts, prompted.decode, supervisor.check)
            finally:
                rollouts.close()


def _training_data(
    request: EvalRequest, target: EvalTarget, config: JobConfig, tell: Tell
) -> overlap.TrainingQuestions | None:
    """What the model was trained on, where that is known."""
    train_data, key = request.train_data, "--train-data "
    if train_data is None and target.run is not None and config.data.kind == "arpo_parquet":
        train_data, key = config.data.path, "data.path="
    if train_data is None:
        return None
    tell(f"looking for the questions in {train_data}")
    return overlap.training_questions(train_data, key)


def _held(prompted: PromptedQuestions, training: overlap.TrainingQuestions) -> dict[str, set[str]]:
    """The ids of the questions that the training data holds, by benchmark."""
    held: dict[str, set[str]] = {name: set() for name in prompted.scorers}
    for each in overlap.find_overlaps([question for question, _ in prompted.asked], training.texts):
        held[each.question.benchmark].add(each.question.id)
    return held


def _figures(
    request: EvalRequest,
    config: JobConfig,
    prompted: PromptedQuestions,
    kept: Sequence[Attempt],
    held: Mapping[str, set[str]] | None,
) -> list[EvalSummary]:
    """A row for each benchmark, in the order in which they were asked for."""
    asked = {(question.benchmark, question.id) for question, _ in prompted.asked}
    kept = [attempt for attempt in kept if (attempt.benchmark, attempt.question_id) in asked]
    return [
        summarize(
            [attempt for attempt in kept if attempt.benchmark == name],
            metric=prompted.metrics[name],
            k=request.k,
            seed=config.seed,
            overlapping=None if held is None else held[name],
        )
        for name in prompted.scorers
    ]


def _notes(
    prompted: PromptedQuestions,
    sets: Sequence[TestSet],
    missing: Sequence[Benchmark],
    request: EvalRequest,
    training: overlap.TrainingQuestions | None,
) -> list[str]:
    """What a reader of the tables must know."""
    notes = list(prompted.notes)
    for each in sets:
        if not each.known_file:
            digest = each.sha256[:12]
            notes.append(
                f"{each.benchmark.name}: {each.path.name} (sha256 {digest}...) is not a file known to this version"
            )
        if each.left_out:
            row, reason = each.left_out[0]
            notes.append(f"{each.benchmark.name}: {len(each.left_out)} rows left out, the first (row {row}): {reason}")
    if missing:
        notes.append(f"not evaluated, no file in {request.data}: {', '.join(each.name for each in missing)}")
    if request.tasks is not None:
        notes.append(f"only the first {request.tasks} questions of each benchmark")
    if training is not None and training.note:
        notes.append(training.note)
    return notes


def _judging(judge: Judge | None) -> list[str]:
    """What a reader must know of the judge: of answers that it gave no verdict on, some are scored by rule."""
    if judge is None:
        return []
    counts = judge.take_counts()
    return [
        f"by the last process of this evaluation the judge was asked {counts['asked']:.0f} times "
        f"({counts['cached']:.0f} replies were kept from before); {counts['unreadable']:.0f} replies had no verdict, "
        f"{counts['fallbacks']:.0f} questions had none because it was down, and {counts['waited_s']:.0f} s were waited "
        "for it"
    ]


def _report(
    out: RunDirectory,
    target: EvalTarget,
    tools: Tools,
    config: JobConfig,
    figures: Sequence[EvalSummary],
    notes: Sequence[str],
    kept: Sequence[Attempt],
    tell: Tell,
) -> dict[str, Any]:
    """Write records, summary and tables; returns what the command prints."""
    drawn = config.evaluation
    sampling = f"temperature {drawn.temperature:g}, top_p {drawn.top_p:g}, top_k {drawn.top_k or 'all'}"
    sampling += f", repetition penalty {drawn.penalty:g}, seed {config.seed}"
    failed = Counter(attempt.outcome.value for attempt in kept if attempt.outcome in TRANSIENT)
    told = [f"{target.name}: {sampling}", *notes]
    if failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()))
        told.append(
            f"{failed.total()} of {len(kept)} attempts failed for reasons that may be over ({kinds}) and count as "
            "wrong: the same command makes them again, or has them judged"
        )
        tell(f"warning: {told[-1]}")
    refused = [attempt.detail for attempt in kept if attempt.outcome is Outcome.REFUSED]
    if refused:
        told.append(
            f"{len(refused)} of {len(kept)} attempts were refused by the server and count as wrong, also when the same "
            f"command goes on; the first: {refused[0]}"
        )
        tell(f"warning: {told[-1]}")
    rows = {row.benchmark: row.to_dict() for row in figures}
    method = {Tools.NONE: "no tools", Tools.PROMPT: "TIR prompting", Tools.TRAINED: "trained"}[tools]
    write_records(out.path / "records.parquet", kept)
    summary = {"model": target.name, "method": method, "benchmarks": rows, "notes": told}
    write_json(out.path / report.SUMMARY, summary)
    report.write_reports(out.path, [report.EvalResult(target.name, method, rows, told)])
    single = next(iter(rows.values())) if len(rows) == 1 else {}
    return {"model": str(target.model or target.name), "out": str(out.path), **single, "benchmarks": rows}
