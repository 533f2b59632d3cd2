"""`arpo`: the command line. Imports of torch and friends wait until a command needs them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.bench import app as bench
from arpo_megatron.cli.cluster import ConfigFile
from arpo_megatron.cli.cluster import app as cluster
from arpo_megatron.cli.evaluation import app as evaluation
from arpo_megatron.cli.study import app as study
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config
from arpo_megatron.config.yaml import yaml_text
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, run_directory

app = typer.Typer(
    name="arpo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train tool-using language models with ARPO. Begin with [bold]arpo demo[/bold]: a tiny agent learns to use "
    "its tools on two CPU cores, in minutes.",
)
app.add_typer(bench, name="bench")
app.add_typer(cluster)
app.add_typer(evaluation)
app.add_typer(study, name="study")

Recipe = Annotated[str, typer.Argument(help="Recipe name, with variants as RECIPE+VARIANT; `arpo recipes` lists them.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. algorithm.entropy_weight=0.4")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the newest run of this config from its last step.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and what would run, then stop.")]
Seed = Annotated[int | None, typer.Option(help="Everything random follows from it; short for seed=N.")]


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Seed = None,
    algorithm: Annotated[str | None, typer.Option(help="arpo, or a comparison: grpo, random, arpo_reference.")] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """The main job at laptop size: cold start, evaluation, ARPO, evaluation, export, and one question answered.

    The last line of standard output is one JSON object with the figures.
    """
    overrides = [*([] if algorithm is None else [f"algorithm.name={algorithm}"]), *(overrides or ())]
    job = _resolve("quickstart", overrides, config, seed)
    if dry_run:
        return _print_plan(job)
    from arpo_megatron.launch.demo import run_demo

    print(json.dumps(run_demo(job, resume=resume)), flush=True)
    return None


def _start_train(job: JobConfig, resume: bool) -> None:
    from arpo_megatron.launch.job import run_job

    run_job(job, resume=resume)


def _start_sft(job: JobConfig, resume: bool) -> None:
    from arpo_megatron.launch.job import run_sft

    print(json.dumps(run_sft(job, resume=resume)), flush=True)


def _recipe_command(name: str, text: str, start: Callable[[JobConfig, bool], None]) -> None:
    """Add a command that runs a recipe; all of them take the same overrides and options."""

    @app.command(name, help=text)
    def command(
        recipe: Recipe,
        overrides: Overrides = None,
        config: ConfigFile = None,
        seed: Seed = None,
        resume: Resume = False,
        dry_run: DryRun = False,
    ) -> None:
        job = _resolve(recipe, overrides, config, seed)
        if name == "sft" and job.sft.steps == 0:
            raise UserError(f"recipe {recipe} has no cold start: give sft.steps=N")
        if dry_run:
            _print_plan(job)
        else:
            start(job, resume)


_recipe_command(
    "train",
    "Run a recipe on this machine: cold start where it has one, the ARPO loop, and the export.\n\n"
    "Example: arpo train quickstart algorithm.entropy_weight=0.4 train.steps=20",
    _start_train,
)
_recipe_command(
    "sft",
    "Run only the cold start of a recipe, on conversations (sft.data=FILE) or generated demonstrations, and export the "
    "model to RUN_DIR/sft.\n\nThe last line of standard output is one JSON object with the figures.",
    _start_sft,
)


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, e.g. runs/quickstart-arpo-seed1")]


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option(help="Hugging Face directory to write; must not exist.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
) -> None:
    """Turn a checkpoint of a run into a Hugging Face directory that transformers and SGLang load."""
    from arpo_megatron.launch.job import export_checkpoint

    print(export_checkpoint(_open_run(run_dir), out, step))


@app.command("replay-pack")
def replay_pack(
    file: Annotated[Path, typer.Argument(help="Dump of a skipped update: RUN_DIR/skipped_updates/*.npz.")],
    run: Annotated[Path | None, typer.Option(help="Run directory; default: the one that the file lies in.")] = None,
) -> None:
    """Compute an update again that was skipped, and say which of its quantities are not finite.

    The weights are those of the run's newest whole checkpoint; nothing is changed.
    """
    from arpo_megatron.launch.job import replay_bad_update

    print(replay_bad_update(_open_run(run or file.resolve().parent.parent), file), end="", flush=True)


@app.command()
def trees(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="Step whose trees to show; default: the last.")] = None,
    count: Annotated[
        int, typer.Option(min=0, help="How many trees to draw below the list, the most telling first.")
    ] = 1,
    tree: Annotated[int | None, typer.Option(min=0, help="Draw the one with this number in the list.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this SVG file instead of the screen.")] = None,
) -> None:
    """List and draw the rollout trees of a step: where they forked, how uncertain the policy was, who was right."""
    from arpo_megatron.cli.trees import show_trees

    show_trees(_open_run(run_dir), step=step, tree=tree, count=count, svg=svg)


@app.command("replay-tree")
def replay_tree(
    file: Annotated[Path, typer.Argument(help="Stored trees: RUN_DIR/trees/step_N.parquet.")],
    tree: Annotated[int | None, typer.Option(min=0, help="Only the one with this number; default: all.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The run's config.yaml; default: that of the run the file lies in.")
    ] = None,
) -> None:
    """Derive every branching decision of stored trees again from tree, entropies and seed.

    Shows the first difference, if there is one, and ends with code 1 then.
    """
    from arpo_megatron.cli.trees import replay_trees

    if not replay_trees(file, tree=tree, config=config):
        raise typer.Exit(1)


@app.command("judge-report")
def judge_report(
    recipe: Recipe,
    labels: Annotated[
        Path, typer.Option(help='JSON lines with "question", "truth", "answer" and "correct" (true or false).')
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
) -> None:
    """How far a job's judge (reward.judge) agrees with labels, and how often hostile answers fool it.

    Prints one JSON object. The rules that would score in its place are measured beside it.
    """
    from arpo_megatron.rewards.judge.report import report

    print(json.dumps(report(_resolve(recipe, overrides, config, None).reward.judge, labels)), flush=True)


@app.command()
def health(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or the name of a submitted one.")],
    cluster: Annotated[str | None, typer.Option(help="Look in this profile's `runs` only.")] = None,
) -> None:
    """Say what is up in a running job: each role, since when, how often it was restarted and why."""
    from arpo_megatron.cluster import runs as commands
    from arpo_megatron.cluster.ssh import elsewhere
    from arpo_megatron.launch.health import print_health

    elsewhere(cluster, "health", run)
    if (Path(run) / "config.yaml").is_file() and not (Path(run) / "submissions").is_dir():
        print_health(run_directory.RunDirectory(Path(run)))
    else:
        commands.print_health(commands.find_run(run, cluster))


Gpu = Annotated[str, typer.Option(help="h100-80, h200 or a100-80.")]


@app.command()
def recipes() -> None:
    """List the recipes with their model, nodes of eight H100 80 GB and the memory expected of the fullest GPU."""
    from arpo_megatron.hardware.specs import GIB
    from arpo_megatron.plan import GPUS, plan

    print(f"{'recipe':15} {'model':33} nodes  GiB  variants")
    for name in resolve.recipe_names():
        job = resolve.resolve(name)
        found = plan(job, GPUS["h100-80"])
        model = job.model.hub_id or "made on the spot, for a CPU"
        size = "" if job.model.is_generated else f"{found.nodes:5} {found.peak_bytes / GIB:4.0f}"
        print(f"{name:15} {model:33} {size:10}  {' '.join(resolve.variant_names(name))}")
    print(
        "\nRECIPE+VARIANT+... lays variants over a recipe; `arpo show` says what it is then, `arpo plan` what it needs"
    )


@app.command()
def show(recipe: Recipe, overrides: Overrides = None, config: ConfigFile = None, seed: Seed = None) -> None:
    """Print a resolved config and where each value comes from: default, base, recipe, variant, file or override."""
    from arpo_megatron.jobs.explain import render

    print(render(recipe, file=config, overrides=_with_seed(overrides, seed)), end="")


@app.command("plan")
def plan_command(
    recipe: Recipe,
    overrides: Overrides = None,
    config: ConfigFile = None,
    gpu: Gpu = "h100-80",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; default: those of the recipe's layout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    search: Annotated[bool, typer.Option(help="Look for better layouts too: seconds.")] = True,
) -> None:
    """What a job will need: memory by part, seconds by phase, GPU-hours, and better layouts for as many GPUs.

    Ends with code 1 when it does not fit.
    """
    from arpo_megatron.plan import Hardware, plan, report
    from arpo_megatron.plan.nodes import on_nodes
    from arpo_megatron.plan.search import search as search_layouts

    hardware = Hardware.named(gpu)
    job = on_nodes(recipe, nodes, hardware.gpus, file=config, overrides=overrides or ())
    found = plan(job, hardware, nodes)
    others = search_layouts(found.config, hardware) if search else None
    if as_json:
        print(json.dumps({**found.to_dict(), "best": [], **(others.to_dict() if others else {})}))
    else:
        print(report.render(found), end="" if others is None else "\n")
        if others is not None:
            print(report.render_search(others), end="")
    if not found.fits:
        raise typer.Exit(1)


def _resolve(recipe: str, overrides: Sequence[str] | None, config: Path | None, seed: int | None) -> JobConfig:
    return resolve.resolve(recipe, file=config, overrides=_with_seed(overrides, seed))


def _with_seed(overrides: Sequence[str] | None, seed: int | None) -> list[str]:
    return [*(overrides or ()), *([] if seed is None else [f"seed={seed}"])]


def _open_run(path: Path) -> run_directory.RunDirectory:
    run = run_directory.RunDirectory(path)
    if not run.config.is_file():
        raise UserError(f"{path} is not a run directory (no config.yaml there)")
    return run


def _print_plan(config: JobConfig) -> None:
    """The resolved config, then the processes and phases in order."""
    from arpo_megatron.jobs.inputs import check_inputs
    from arpo_megatron.plan.report import layout

    check_inputs(config)
    print(yaml_text(dump_config(config)), end="")
    parallel, train_config = config.parallel, config.train
    print(f"# plan: a new run in {run_directory.next_path(config)}")
    print("#   sandbox  python -m tools_sandbox")
    engines = "engine " if config.engine.replicas == 1 else f"{config.engine.replicas} engines"
    print(f"#   {engines}  SGLang, tensor parallel {config.engine.tensor}, {config.model.dtype}")
    print(f"#   trainer  {parallel.world_size} rank(s){f': {said}' if (said := layout(parallel)) else ''}")
    if config.sft.steps:
        print(f"#   cold start: {config.sft.steps} updates of {config.sft.batch} demonstrations")
    print(
        f"#   {config.algorithm.name}: {train_config.steps} steps of {train_config.tasks_per_step} tasks x "
        f"{config.algorithm.group_size} trajectories, {config.algorithm.minibatches} update(s) a step"
    )
