"""`arpo list ...`: recipes, methods, metrics, runs, tools and benchmarks by name."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arpo_megatron.cli.options import ClusterOfRun, next_command
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RUNS
from arpo_megatron.monitor.tree_view import printable

app = typer.Typer(no_args_is_help=True, help="List recipes, methods, metrics, runs, tools or benchmarks.")

_METRICS = Path(__file__).with_name("metrics.md")
"""A link to docs/reference/run-directory.md, which explains every metric."""


@app.command()
def recipes() -> None:
    """List the recipes: model, nodes of eight H100 80 GB, expected memory of the fullest GPU, variants."""
    from arpo_megatron.hardware.specs import GIB
    from arpo_megatron.plan import GPUS, plan

    print(f"{'recipe':15} {'model':33} nodes  GiB  variants")
    for name in resolve.recipe_names():
        job = resolve.resolve(name)
        found = plan(job, GPUS["h100-80"])
        model = job.model.hub_id or "a tiny random model, for a CPU"
        size = "" if job.model.is_generated else f"{found.nodes:5} {found.peak_bytes / GIB:4.0f}"
        print(f"{name:15} {model:33} {size:10}  {' '.join(resolve.variant_names(name))}")
    print("\nAdd variants as RECIPE+VARIANT+...")
    next_command("arpo", "show", "RECIPE")


@app.command()
def methods() -> None:
    """List the presets of `algorithm.name`: published methods, each with its paper."""
    from arpo_megatron.registry import ExtensionPoint, load, names

    rows = []
    for name in names(ExtensionPoint.PRESET):
        found = load(ExtensionPoint.PRESET, name)
        parts = [f"{key} {found.values[f'algorithm.{key}']}" for key in ("branching", "advantage", "loss")]
        rows.append((name, ", ".join(parts), found.about))
    print_table(("algorithm.name", "components", "method"), rows)
    next_command("arpo", "show", "quickstart", "algorithm.name=NAME")


@app.command()
def metrics(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only metrics with these words.")
    ] = None,
) -> None:
    """List the metrics of a step with their meaning."""
    _, _, section = _METRICS.read_text(encoding="utf-8").partition("\n## Metrics\n")
    lines = re.findall(r"^\| `([\w/]+)` \| (.*) \|$", section, re.MULTILINE)
    rows = [(name, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning)) for name, meaning in lines]
    found = [row for row in rows if all(word.lower() in " ".join(row).lower() for word in words or ())]
    if not found:
        raise UserError(f"no metric has the words {' '.join(words or ())}; `arpo list metrics` has all")
    print_table(("metric", "meaning"), found)
    next_command("arpo", "view", "RUN_DIR")


@app.command()
def runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Directory of runs; default: runs, or that of --cluster.")
    ] = None,
    cluster: ClusterOfRun = None,
) -> None:
    """List the runs in a directory: method, state, step, held-out success, time of the last event."""
    from arpo_megatron.cli.look import run_rows
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "list", "runs", None if folder is None else str(folder))
    if folder is None:
        folder = RUNS if cluster is None else load_profile(cluster).runs.expanduser()
    rows = run_rows(folder)
    if not rows:
        raise UserError(f"{folder} has no runs: start one with `arpo demo`")
    print_table(("run", "method", "state", "step", "held-out success", "last event"), rows)
    next_command("arpo", "view", folder)


@app.command()
def tools(
    file: Annotated[Path | None, typer.Option("--file", help="YAML file of the tool service (sandbox.file).")] = None,
) -> None:
    """List the tools that the service can offer: name, arguments, what turns them on.

    The MCP servers of the file are started for a moment to list their tools.
    """
    from importlib import metadata

    from arpo_megatron.launch.tool_check import mcp_tools
    from tools_sandbox.catalog import ENTRY_POINTS, build_tools
    from tools_sandbox.config import ConfigError, ToolServiceConfig, load_config
    from tools_sandbox.python_tool.tool import PythonTool
    from tools_sandbox.search.tool import SearchTool

    try:
        config = ToolServiceConfig() if file is None else load_config(file)
    except ConfigError as error:
        raise UserError(f"--file {error}") from None
    try:
        found = build_tools(config)
    except ConfigError as error:
        raise UserError(f"--file {file}: {error}") from None
    rows = [(tool.name, ", ".join(tool.schema().get("properties", ())), tool.description) for tool in found.values()]
    if SearchTool.name not in found:
        rows.append((SearchTool.name, "query, k", "(off: it needs search.sources, or data that brings its own)"))
    if "browse" not in found:
        rows.append(("browse", "url", "(off: browse.enabled)"))
    served = {} if file is None or not config.mcp else mcp_tools(file)
    rows += [
        (name, ", ".join(each["arguments"].get("properties", ())), each["description"]) for name, each in served.items()
    ]
    used = {plugin.name for plugin in config.plugins}
    rows += [
        (entry.name, "", f"(off: add it to plugins; from {entry.value})")
        for entry in metadata.entry_points(group=ENTRY_POINTS)
        if entry.name not in used
    ]
    print_table(("tool", "arguments", "description"), rows)
    offered = ",".join(sorted([*found, *served], key=lambda name: name == PythonTool.name))
    given = [] if file is None else [f"sandbox.file={file}"]
    next_command("arpo", "train", "RECIPE", *given, f"rollout.tools=[{offered}]")


@app.command()
def benchmarks() -> None:
    """List the benchmarks of `arpo eval`: suite, metric, licence, source of the file."""
    from arpo_megatron.evaluation.benchmarks import BENCHMARKS, SUITES

    rows = []
    for name, benchmark in BENCHMARKS.items():
        suites = ", ".join(suite for suite, members in SUITES.items() if name in members)
        rows.append((name, suites, benchmark.metric, benchmark.licence, benchmark.source))
    print_table(("benchmark", "suites", "metric", "licence", "source"), rows)
    next_command("arpo", "eval", "RUN_DIR", "--suite", "NAME", "--data", "DIR")


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table on standard output; without a terminal one row per line, so that programs can read it."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title == titles[0])
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # no markup
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    with (wide := Console(width=1000)).capture() as text:
        wide.print(table)
    print("\n".join(line.rstrip() for line in text.get().rstrip().splitlines()))
