"""`arpo study ...`: experiments over several seeds, from equal cold starts to a table and a plot."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.options import DryRun, Overrides, next_after_dry_run, next_command, open_run, with_dry_run
from arpo_megatron.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    help="Compare methods on a generated family of tasks, several seeds each, from equal cold starts.",
)


def _study_command(name: str, text: str) -> None:
    """A command that runs the study `name`."""

    @app.command(name, help=text)
    def study(
        overrides: Overrides = None,
        seeds: Annotated[
            int | None, typer.Option(min=1, help="Seeds, from 1 on; default: 5 (efficiency), 3 (ablation).")
        ] = None,
        jobs: Annotated[int, typer.Option(min=1, help="Runs at a time on this machine.")] = 1,
        out: Annotated[Path | None, typer.Option(help="Directory of the runs; default: runs/study-NAME.")] = None,
        report: Annotated[
            Path | None,
            typer.Option(help="Directory of table, plot and Parquet; default: report/ in that of the runs."),
        ] = None,
        only: Annotated[str | None, typer.Option(metavar="ARM[,ARM]", help="Only these arms.")] = None,
        dry_run: DryRun = False,
    ) -> None:
        from dataclasses import replace

        from arpo_megatron.jobs.run_directory import RUNS
        from arpo_megatron.monitor.progress import Progress
        from arpo_megatron.studies.designs import DESIGNS
        from arpo_megatron.studies.plot import check_can_draw
        from arpo_megatron.studies.report import StudyResults, write_report
        from arpo_megatron.studies.results import collect
        from arpo_megatron.studies.runner import StudyRunner
        from arpo_megatron.studies.runs import check_runs, plan_runs

        check_can_draw()
        design = DESIGNS[name]
        overrides = overrides or []
        if only is not None:
            arms = only.split(",")
            if unknown := [arm for arm in arms if arm not in design.arms]:
                raise UserError(f"--only {only}: {name} has no arm {unknown[0]!r}; arms: {', '.join(design.arms)}")
            design = replace(design, arms=tuple(arm for arm in design.arms if arm in arms))
        directory = (out or RUNS / f"study-{name}").absolute()
        runs = plan_runs(design, directory, seeds or design.seeds, overrides)
        check_runs(runs)
        if dry_run:
            for run in runs:
                print(f"{run.name}: {run.directory.path}{', done' if run.done else ', started' if run.started else ''}")
            next_after_dry_run()
            return
        directory.mkdir(parents=True, exist_ok=True)
        with Progress() as progress:
            runner = StudyRunner(runs, directory, jobs, progress)
            runner.run()
        options = [f"--seeds {seeds or design.seeds}", f"--jobs {jobs}", *([] if only is None else [f"--only {only}"])]
        command = " ".join(["arpo study", name, *map(shlex.quote, overrides), *options])
        try:
            results = StudyResults.select(design, collect(runs), command, sorted({run.seed for run in runs}))
            for path in write_report(results, report or directory / "report"):
                print(path)
            sys.stdout.flush()
        finally:
            runner.check()  # after the report: a failed run does not withhold the report of complete seeds
        next_command("arpo", "view", directory)


_study_command(
    "efficiency",
    "Held-out reward against executed tool calls: GRPO, GRPO at equal calls, random forks, ARPO, AEPO.\n\n"
    "Stopped at any moment, the same command resumes it.",
)
_study_command("ablation", "Effect of entropy weight, share of forks and beam on ARPO; works like `efficiency`.")


@app.command()
@with_dry_run
def entropy(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs with stored trees.")],
    out: Annotated[Path, typer.Option(help="Directory for table, plot and Parquet.")],
) -> None:
    """Entropy of the first tokens after tool results, after prompts, and elsewhere, from stored trees."""
    from arpo_megatron.studies import entropies
    from arpo_megatron.studies.plot import check_can_draw
    from arpo_megatron.studies.report import made_by

    check_can_draw()

    rows = entropies.collect([open_run(path) for path in runs])
    command = shlex.join(["arpo", "study", "entropy", *map(str, runs), "--out", str(out)])
    for path in entropies.write_report(rows, out, made_by(command)):
        print(path)
    next_command("arpo", "view", *runs)


@app.command()
@with_dry_run
def information(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe of tasks and limits, for example trails.")],
    out: Annotated[Path, typer.Option(help="Directory of the samples of this policy.")],
    overrides: Overrides = None,
    trees: Annotated[int, typer.Option(min=2, help="Trees per arm.")] = 1000,
    direction_trees: Annotated[int, typer.Option(min=2, help="Trees of the reference gradient.")] = 1000,
) -> None:
    """Information of a tree about the gradient, per tool call, at the policy model.path=DIRECTORY.

    Arms: GRPO, ARPO with pooled and reserved forks, ARPO as released, random forks at ARPO's rate; 16 trajectories
    each. Stopped at any moment, the same command continues; `information-page` shows what there is.
    """
    from arpo_megatron.monitor.progress import Progress
    from arpo_megatron.studies.information.sampling import INFO, SamplingPlan, sample
    from arpo_megatron.utils.atomic import write_json

    plan = SamplingPlan.create(recipe, overrides or [], out)
    out.mkdir(parents=True, exist_ok=True)
    counts = ["--trees", str(trees), "--direction-trees", str(direction_trees), "--out", str(out)]
    command = shlex.join(["arpo", "study", "information", recipe, *(overrides or []), *counts])
    write_json(out / INFO, {"command": f"`{command}`"})
    with Progress() as progress:
        sample(plan, direction_trees=direction_trees, trees=trees, note=progress.note)
    next_command("arpo", "study", "information-page", out)


@app.command()
@with_dry_run
def information_page(
    studies: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of `information`.")],
    out: Annotated[Path | None, typer.Option(help="Write README.md into this directory, instead of printing.")] = None,
) -> None:
    """Table of the information per call of one or several policies, from the trees sampled so far."""
    from arpo_megatron.studies.information.report import render
    from arpo_megatron.studies.report import made_by

    page = render(studies, made_by(shlex.join(["arpo", "study", "information-page", *map(str, studies)])))
    if out is None:
        print(page)
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / "README.md").write_text(page, encoding="utf-8")
        print(out / "README.md")
    next_command("arpo", "study", "information", "RECIPE", "--out", "DIR")
