"""`arpo eval`, `arpo eval-report` and `arpo decontaminate`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.evaluation.prompts import Tools

app = typer.Typer()

DATA = Path("data/eval")
Data = Annotated[Path, typer.Option(help="Directory with the files of the benchmarks.")]
SkipMissing = Annotated[
    bool, typer.Option("--skip-missing", help="Go on without benchmarks whose file is missing; they are named.")
]
EvalTarget = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help="A run directory, a Hugging Face directory, the URL of a server that speaks OpenAI's format, or "
        "`oracle` or `wrong` (known answers, to check scorers and files).",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Config values, e.g. evaluation.temperature=0 engine.replicas=2"),
]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]",
        help="reasoning, deepsearch, names of benchmarks, or held_out: a run's own held-out tasks, its default.",
    ),
]
K = Annotated[int, typer.Option(min=1, help="Attempts of which the best counts, for pass@k.")]
Attempts = Annotated[
    int | None, typer.Option(min=1, help="Attempts at a question; default: k. More make pass@k more precise.")
]
WithTools = Annotated[
    Tools | None,
    typer.Option(help="none, prompt (the protocol is explained) or trained; default: trained, prompt for a URL."),
]
Model = Annotated[
    str | None,
    typer.Option(help="Of a run: Hugging Face directory, default its export. Of a URL: the model's name there."),
]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Only the first N questions (held_out: default the run's own number).")
]
TrainData = Annotated[
    Path | None,
    typer.Option(help="Training file to look for the questions in; default: that of a run on released files."),
]
SystemPrompt = Annotated[
    Path | None, typer.Option(help="File with the system prompt, in the place of the built-in one.")
]
Out = Annotated[Path | None, typer.Option(help="Directory for records and tables; the same evaluation goes on in it.")]


@app.command("eval")
def evaluate(
    target: EvalTarget,
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
    out: Out = None,
) -> None:
    """Answer benchmarks or held-out tasks through an engine or a server and the tools, and score the answers.

    Stopped at any moment, the same command goes on where it was. The last line of standard output is one JSON object.
    """
    from arpo_megatron.evaluation.run import EvalRequest
    from arpo_megatron.evaluation.run import evaluate as run

    request = EvalRequest(
        target=target,
        suite=suite,
        k=k,
        attempts=attempts,
        tools=tools,
        data=data,
        skip_missing=skip_missing,
        tasks=tasks,
        model=model,
        out=out,
        train_data=train_data,
        system_prompt=system_prompt,
        overrides=tuple(overrides or ()),
    )
    print(json.dumps(run(request, _tell)), flush=True)


@app.command("eval-report")
def eval_report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of finished evaluations (`out` of `arpo eval`).")
    ],
    out: Annotated[Path, typer.Option(help="Directory for report.md, report.tex and report.html.")],
) -> None:
    """Put several evaluations into one table, the published rows beside them."""
    from arpo_megatron.evaluation.report import read_summary, write_reports

    measured = [read_summary(directory) for directory in directories]
    out.mkdir(parents=True, exist_ok=True)
    for path in write_reports(out, measured):
        print(path)


@app.command()
def decontaminate(
    train_data: Annotated[
        Path, typer.Argument(metavar="FILE", help="Training questions: parquet, JSON lines, a JSON array or CSV.")
    ],
    suite: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Evaluation questions to look for.")
    ] = "reasoning,deepsearch",
    data: Data = DATA,
    skip_missing: SkipMissing = False,
) -> None:
    """Name the evaluation questions that a training file holds, one JSON object a line; ends with code 1 for any."""
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
        _tell(f"{name}: {count} of {len(tested.questions)} questions are in {train_data}")
    if training.note:
        _tell(training.note)
    if missing:
        _tell(f"not looked for, no file in {data}: {', '.join(each.name for each in missing)}")
    if found:
        raise typer.Exit(1)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
