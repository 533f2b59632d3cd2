"""`arpo status`, `logs`, `health`, `compare` and `trees`: local and submitted runs.

A run is local if its directory has no submissions.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from arpo_megatron.cli.lists import print_table
from arpo_megatron.cli.options import (
    ClusterOfRun,
    Panel,
    RunDir,
    RunName,
    complete_run,
    next_command,
    open_run,
    with_dry_run,
)
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RUNS, RunDirectory
from arpo_megatron.monitor.progress import duration
from arpo_megatron.monitor.tree_view import printable

app = typer.Typer()

_EVENTS = 5
"""Last events in the status of a local run."""


@app.command(rich_help_panel=Panel.LOOK)
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, directory of runs, or name of a submitted run; default: all.",
            autocompletion=complete_run,
        ),
    ] = None,
    cluster: ClusterOfRun = None,
) -> None:
    """Show the state of a run: finished steps, time left, held-out success, processes, last events; Slurm's state."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "status", run)
    if run is not None and (local := _local(run)) is not None:
        _print_status(local)
        return
    folder = RUNS if run is None else Path(run)
    if rows := run_rows(folder) if cluster is None else []:
        print_table(("run", "method", "state", "step", "held-out success", "last event"), rows)
    found = []
    if run is None or not rows:
        with nullcontext() if run is None or not folder.is_dir() else suppress(UserError):  # a directory needs no job
            found = runs.print_status(run, cluster)
    if found:
        next_command("arpo", "status" if run is None else "logs", *runs.address_words(found[-1]))
    elif rows:
        next_command("arpo", "status", folder / rows[-1][0])
    elif cluster is not None:
        print(f"no run was submitted to {cluster}: `arpo submit` starts one")
        next_command("arpo", "submit", "RECIPE", "--cluster", cluster)
    else:
        print(f"no run exists in {folder}{'' if run else ', and none was submitted'}: `arpo demo` starts one")
        next_command("arpo", "demo")


@app.command(rich_help_panel=Panel.LOOK)
def logs(
    run: RunName,
    service: Annotated[
        str | None,
        typer.Option(
            help="Process of the job: train, sft, engine (or engine-0, ...), sandbox, ...; on a cluster also job (its "
            "supervisor, the default) and doctor. Default of a local run: the lines that its terminal showed."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="Number of last lines to print first.")] = 40,
    cluster: ClusterOfRun = None,
) -> None:
    """Print the log of one process of a run."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "logs", run, service=service, follow=follow, lines=lines)
    local = _local(run)
    if local is None:
        runs.print_log(runs.find_run(run, cluster), service or "job", lines=lines, follow=follow)
    elif service is None:
        _print_events(local, lines, follow=follow)
    else:
        runs.print_log(local, service, lines=lines, follow=follow, ended=lambda: not _is_running(local))
    next_command("arpo", "status", run)


@app.command(rich_help_panel=Panel.LOOK)
def health(run: RunName, cluster: ClusterOfRun = None) -> None:
    """Show the processes of a running job: state, uptime, number of restarts, last error."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node
    from arpo_megatron.launch.health import print_health

    run_on_login_node(cluster, "health", run)
    if (local := _local(run)) is not None:
        print_health(local)
    else:
        runs.print_health(runs.find_run(run, cluster))
    next_command("arpo", "logs", run, "--service", "NAME")


@app.command(rich_help_panel=Panel.LOOK)
def compare(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Run directories, or names in runs/.", autocompletion=complete_run),
    ],
) -> None:
    """Compare runs: the config values that differ, then their results side by side."""
    if len(run_dirs) < 2:
        raise UserError("arpo compare needs two run directories")
    pages = [_page(open_run(path)) for path in run_dirs]
    names = tuple(path.resolve().name for path in run_dirs)
    keys = sorted({key for page in pages for key in page["config"]} - {"run_dir"})
    values = {key: [str(page["config"].get(key, "-")) for page in pages] for key in keys}
    differing = [(key, *row) for key, row in values.items() if len(set(row)) > 1]
    if differing:
        print_table(("config", *names), differing)
    else:
        print("the configs are equal")
    figures = [_figures(page) for page in pages]
    print_table(("result", *names), [(key, *(each[key] for each in figures)) for key in figures[0]])
    next_command("arpo", "view", *run_dirs)


@app.command(rich_help_panel=Panel.LOOK)
@with_dry_run
def trees(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="Step of the trees; default: the last stored one.")] = None,
    count: Annotated[
        int, typer.Option(min=0, help="Number of trees to draw below the list, most informative first.")
    ] = 1,
    tree: Annotated[int | None, typer.Option(min=0, help="Draw only the tree with this number in the list.")] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write the drawing to this SVG file instead of the terminal.")
    ] = None,
    reflections: Annotated[
        Path | None,
        typer.Option(help="Write failed branches with the right one next to them as SFT data (.jsonl) instead."),
    ] = None,
    reflection: Annotated[
        str, typer.Option(help="Sentence between both branches, with --reflections.")
    ] = "\nThat step was wrong. I take another one.\n",
) -> None:
    """List and draw the rollout trees of a step: their forks, the policy's entropies, and the rewards."""
    from arpo_megatron.cli.trees import show_trees, write_reflections

    if reflections is not None:
        write_reflections(open_run(run_dir), step=step, file=reflections, text=reflection)
        return
    show_trees(open_run(run_dir), step=step, tree=tree, count=count, svg=svg)
    next_command("arpo", "view", run_dir)


def run_rows(folder: Path) -> list[tuple[str, ...]]:
    """Return name, method, state, step, held-out success and last event of each run below `folder`, oldest first."""
    found = [RunDirectory(path.parent) for path in folder.glob("*/config.yaml")]
    rows: list[tuple[str, ...]] = []
    for run in sorted(found, key=lambda run: run.config.stat().st_mtime):
        page = _page(run)
        last = page["last_event"]
        when = "-" if last is None else f"{duration(time.time() - last['time'])} ago"
        step = f"{page['step']}/{page['steps']}"
        rows.append((run.path.name, _or_dash(page["method"]), str(page["state"]), step, _success(page), when))
    return rows


def _local(name: str) -> RunDirectory | None:
    """Return the run directory `name`, or runs/`name`; None if there is none or it was submitted to a cluster."""
    for path in (Path(name), RUNS / name):
        run = RunDirectory(path)
        if run.config.is_file():
            return None if run.submissions.is_dir() else run
    return None


def _page(run: RunDirectory) -> dict[str, Any]:
    from arpo_megatron.view.run_page import run_page
    from arpo_megatron.view.runs import FileCache

    return run_page(run, FileCache(), time.time())


def _is_running(run: RunDirectory) -> bool:
    from arpo_megatron.view.runs import is_training

    return is_training(run)


def _or_dash(value: object) -> str:
    """Return the text of a value of a run's page, or "-" for one that the run directory does not have."""
    return "-" if value is None else str(value)


def _success(page: Mapping[str, Any]) -> str:
    measured = [each["success"] for each in page["evaluations"]]
    if not measured:
        return "-"
    return " -> ".join(f"{value:.1%}" for value in dict.fromkeys((measured[0], measured[-1])))


def _print_status(run: RunDirectory) -> None:
    from arpo_megatron.view.rows import Damage
    from arpo_megatron.view.run_page import services

    page = _page(run)
    left = page["eta_s"]
    phase = f", {page['phase']}" if page["phase"] else ""
    print(f"{run.path}: {page['state']}{phase}, step {page['step']} of {page['steps']}", end="")
    print(f", {duration(left)} left" if left else "")
    recipe, method, seed = (_or_dash(page[name]) for name in ("recipe", "method", "seed"))
    print(f"  {recipe}, {method}, seed {seed}; held-out success {_success(page)}")
    for service in services(run):
        state = "up" if service["up"] else "down" if service["last_error"] else "starting"
        print(f"  {service['name']} {state} for {duration(service['seconds'])}, {service['restarts']} restarts")
    for event in page["events"][-_EVENTS:]:
        print(f"  {_clock(event['time'])} {printable(event['text'])}")
    for damage in page["damaged"]:
        print(f"  damaged: {printable(Damage(**damage).line())}")
    for advice in page["advice"]:
        print(f"  advice: {advice['title']}: {advice['detail']} ({advice['page']})")
    running = page["state"] == "running"
    next_command("arpo", *(("logs", run.path, "--follow") if running else ("view", run.path)))


def _print_events(run: RunDirectory, lines: int, *, follow: bool) -> None:
    """Print the events of a local run as its terminal did, with the time of each."""
    from arpo_megatron.monitor.events import EventReader
    from arpo_megatron.view.rows import read_events
    from arpo_megatron.view.run_page import event_line

    reader = EventReader(run.events)  # before the rows are read: no event is missed, one may be shown twice
    shown = [line for event in read_events(run.events).rows if (line := event_line(event)) is not None]
    for line in shown[-lines:] if lines else []:
        print(line)
    running = follow
    while running:
        running = _is_running(run)  # before the events are read: none of the end is missed
        for event in reader.new():
            if (line := event_line(event)) is not None:
                print(line, flush=True)
        if running:
            time.sleep(0.5)


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _figures(page: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of `arpo compare` for one run."""
    metrics = page["metrics"]

    def values(name: str) -> list[float]:
        return [value for value in metrics.get(name, ()) if isinstance(value, int | float)]

    def last(name: str, form: str) -> str:
        return format(values(name)[-1], form) if values(name) else "-"

    spent = sum(sum(values(name)) for name in metrics if name.startswith("seconds/"))
    return {
        "state": str(page["state"]),
        "step": f"{page['step']}/{page['steps']}",
        "held-out success": _success(page),
        "reward, last step": last("reward", ".3f"),
        "entropy, last step": last("entropy_mean", ".3f"),
        "log-prob gap, largest": format(max(values("logprob_gap")), ".1e") if values("logprob_gap") else "-",
        "tool calls executed": format(sum(values("tool_calls_executed")), ".0f"),
        "tool calls inherited": format(sum(values("tool_calls_inherited")), ".0f"),
        "tokens sampled": format(sum(values("tokens_sampled")), ".0f"),
        "time in steps": duration(spent),
        "code": _or_dash(page["code"]),
    }
