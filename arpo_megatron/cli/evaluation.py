"""`arpo eval`, `eval-report`, `judge-report` and `decontaminate`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.jobs import step_model, submit_command
from arpo_megatron.cli.options import (
    ConfigFile,
    DryRun,
    OnCluster,
    Overrides,
    Panel,
    Recipe,
    complete_run,
    job_words,
    next_after_dry_run,
    next_command,
    own_command,
    with_dry_run,
)
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.target import Setting

app = typer.Typer()

DATA = Path("data/eval")
Data = Annotated[Path, typer.Option(help="Directory with the benchmark files.")]
SkipMissing = Annotated[
    bool, typer.Option("--skip-missing", help="Skip benchmarks whose file is missing, and list them.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Run directory, Hugging Face directory or URL of an OpenAI-compatible server; `oracle` and `wrong` give "
        "known answers, to check scorers and files.",
        autocompletion=complete_run,
    ),
]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]",
        help="reasoning, deepsearch, names of benchmarks, or held_out (a run's own held-out tasks, default for a run).",
    ),
]
K = Annotated[int, typer.Option(min=1, help="The k of pass@k.")]
Attempts = Annotated[
    int | None, typer.Option(min=1, help="Attempts per question; default: k. More attempts make pass@k more precise.")
]
WithTools = Annotated[
    Tools | None,
    typer.Option(help="none, prompt (the prompt explains the tools) or trained; default: trained, prompt for a URL."),
]
Model = Annotated[
    str | None,
    typer.Option(help="For a run: Hugging Face directory, default its export. For a URL: model name on the server."),
]
Tasks = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of questions to answer, from the first; default: all (held_out: the run's number)."
    ),
]
TrainData = Annotated[
    Path | None,
    typer.Option(help="Training file to search for the questions; default: the run's own, if it trained on files."),
]
WithSetting = Annotated[
    Setting,
    typer.Option(
        "--setting",
        help="Limits: recipes, or authors (theirs, with their prompts and judge's wording; no run).",
    ),
]
JudgeAll = Annotated[
    bool, typer.Option("--judge-all", help="Let the judge (reward.judge) score every benchmark, not only some.")
]
SystemPrompt = Annotated[Path | None, typer.Option(help="File with a system prompt that replaces the built-in one.")]
Out = Annotated[
    Path | None, typer.Option(help="Directory for records and tables. An interrupted evaluation continues in it.")
]


@app.command("eval", rich_help_panel=Panel.EVALUATE)
def evaluate(
    target: Target,
    overrides: Overrides = None,
    suite: Suite = None,
    k: K = 1,
    attempts: Attempts = None,
    tools: WithTools = None,
    model: Model = None,
    tasks: Tasks = None,
    data: Data = DATA,
    skip_missing: SkipMissing = False,
    train_data: TrainData = None,
    system_prompt: SystemPrompt = None,
    setting: WithSetting = Setting.RECIPES,
    judge_all: JudgeAll = False,
    out: Out = None,
    dry_run: DryRun = False,
    cluster: OnCluster = None,
    step: Annotated[int | None, typer.Option(help="For a run: its export of this step's checkpoint.")] = None,
) -> None:
    """Answer benchmarks or held-out tasks with a model and tools, and score the answers.

    After an interruption, the same command continues. The last line of standard output is a JSON object.
    """
    options = {name: value for name, value in locals().items() if name not in ("dry_run", "cluster", "step")}
    if cluster is not None:
        given = {name: value for name, value in options.items() if name not in ("target", "overrides")}
        submit_command(cluster, "eval", target, *(overrides or ()), **given, step=step, dry_run=dry_run)
        return
    if step is not None and not dry_run:  # it exports the checkpoint
        options["model"] = step_model(target, step, model)
    from arpo_megatron.evaluation.run import EvalRequest, describe
    from arpo_megatron.evaluation.run import evaluate as run

    if dry_run:
        print("\n".join(describe(EvalRequest(**options), _log)))
        next_after_dry_run()
        return
    result = run(EvalRequest(**options), _log)
    print(json.dumps(result), flush=True)
    next_command("arpo", "eval-report", result["out"], "--out", "DIR")


@app.command("eval-report", rich_help_panel=Panel.EVALUATE)
@with_dry_run
def eval_report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="--out directories of finished evaluations.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for report.md.")],
) -> None:
    """Put several evaluations into one table, next to the published results."""
    from arpo_megatron.evaluation.report import read_summary, write_report

    results = [read_summary(directory) for directory in directories]
    out.mkdir(parents=True, exist_ok=True)
    print(write_report(out, results))
    next_command("arpo", "eval", "RUN_DIR", "--suite", "NAME", "--data", "DIR")


@app.command("judge-report", rich_help_panel=Panel.EVALUATE)
@with_dry_run
def judge_report(
    recipe: Recipe,
    labels: Annotated[
        Path, typer.Option(help='JSON lines with "question", "truth", "answer" and "correct" (true or false).')
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
) -> None:
    """Measure a job's judge (reward.judge) on labelled answers: agreement, and how often hostile answers fool it.

    Prints one JSON object, which has the scores of the rule-based verifiers for comparison.
    """
    from arpo_megatron.jobs.resolve import resolve
    from arpo_megatron.rewards.judge.report import report

    job = resolve(recipe, file=config, overrides=overrides or ())
    print(json.dumps(report(job.reward.judge, labels)), flush=True)
    next_command("arpo", "train", *job_words(recipe, overrides, config), "--dry-run")


@app.command(rich_help_panel=Panel.EVALUATE)
def decontaminate(
    train_data: Annotated[
        Path, typer.Argument(metavar="FILE", help="Training questions: parquet, JSON lines, a JSON array or CSV.")
    ],
    suite: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Suites or benchmarks whose questions to search for.")
    ] = "reasoning,deepsearch",
    data: Data = DATA,
    skip_missing: SkipMissing = False,
) -> None:
    """List the evaluation questions that a training file contains, one JSON object per line.

    Exits with code 1 if there are any.
    """
    from arpo_megatron.evaluation.benchmarks import select_benchmarks
    from arpo_megatron.evaluation.contamination import find_overlaps, training_questions
    from arpo_megatron.evaluation.questions import read_all

    sets, missing = read_all(select_benchmarks(suite), data, skip_missing=skip_missing)
    training = training_questions(train_data, "")
    found = find_overlaps([question for each in sets for question in each.questions], training.texts)
    for each in found:
        row = {
            "benchmark": each.question.benchmark,
            "question_id": each.question.id,
            "share": round(each.share, 3),
            "question": each.question.text,
            "training_row": each.training_row,
            "training_question": each.training_text,
        }
        print(json.dumps(row))
    for tested in sets:
        name = tested.benchmark.name
        count = sum(each.question.benchmark == name for each in found)
        _log(f"{name}: {count} of {len(tested.questions)} questions are in {train_data}")
    if training.note:
        _log(training.note)
    if missing:
        _log(f"skipped, no file in {data}: {', '.join(each.name for each in missing)}")
    if found:
        _log(f"remove the training rows above from {train_data}")
        next_command(*own_command())
        raise typer.Exit(1)
    next_command("arpo", "train", "RECIPE", f"data.path={train_data}", "--dry-run")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
