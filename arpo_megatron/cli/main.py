"""The `arpo` command line. torch and other slow packages are imported only by the commands that need them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from arpo_megatron.cli.bench import app as bench
from arpo_megatron.cli.cluster import app as cluster
from arpo_megatron.cli.evaluation import app as evaluation
from arpo_megatron.cli.options import ConfigFile, Overrides, Recipe
from arpo_megatron.cli.study import app as study
from arpo_megatron.cli.view import app as view
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
    help="Train tool-using language models with ARPO. Start with [bold]arpo demo[/bold]: in a few minutes on two CPU "
    "cores, a tiny agent learns to use its tools.",
)
app.add_typer(bench, name="bench")
app.add_typer(cluster)
app.add_typer(evaluation)
app.add_typer(study, name="study")
app.add_typer(view)

Resume = Annotated[bool, typer.Option("--resume", help="Continue the newest run of this config from its last step.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the processes, then stop.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of the whole job; the same as seed=N.")]


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Seed = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Algorithm preset: arpo, or grpo, random or arpo_reference to compare with.")
    ] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Run the whole pipeline at laptop size: cold start, evaluation, ARPO, evaluation, export, one answered question.

    The last line of standard output is a JSON object with the results.
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
    """Register a command that runs a recipe. All of these commands take the same arguments and options."""

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
            raise UserError(f"recipe {recipe} has no cold start; add one with sft.steps=N")
        if dry_run:
            _print_plan(job)
        else:
            start(job, resume)


_recipe_command(
    "train",
    "Train a recipe on this machine: the cold start if it has one, the ARPO loop, and the export.\n\n"
    "Example: arpo train quickstart algorithm.entropy_weight=0.4 train.steps=20",
    _start_train,
)
_recipe_command(
    "sft",
    "Run only the cold start of a recipe and export the model to RUN_DIR/sft. It trains on conversations "
    "(sft.data=FILE) or on generated demonstrations.\n\n"
    "The last line of standard output is a JSON object with the results.",
    _start_sft,
)


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, e.g. runs/quickstart-arpo-seed1")]


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option(help="Hugging Face directory to write; it must not exist yet.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
) -> None:
    """Convert a checkpoint of a run to a Hugging Face directory that transformers and SGLang can load."""
    from arpo_megatron.launch.job import export_checkpoint

    print(export_checkpoint(_open_run(run_dir), out, step))


@app.command("replay-pack")
def replay_pack(
    file: Annotated[Path, typer.Argument(help="Dump of a skipped update: RUN_DIR/skipped_updates/*.npz.")],
) -> None:
    """Compute a skipped update again and report which of its quantities are not finite.

    The weights come from the run's newest complete checkpoint. The run is not changed.
    """
    from arpo_megatron.launch.job import replay_skipped_update

    print(replay_skipped_update(_open_run(file.resolve().parent.parent), file), end="", flush=True)


@app.command()
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
) -> None:
    """List and draw the rollout trees of a step: their forks, the policy's entropies, and the rewards."""
    from arpo_megatron.cli.trees import show_trees

    show_trees(_open_run(run_dir), step=step, tree=tree, count=count, svg=svg)


@app.command("replay-tree")
def replay_tree(
    file: Annotated[Path, typer.Argument(help="Stored trees: RUN_DIR/trees/step_N.parquet.")],
    tree: Annotated[int | None, typer.Option(min=0, help="Number of the tree to check; default: all.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Config of the run; default: config.yaml of the file's run directory."),
    ] = None,
) -> None:
    """Recompute every branching decision of stored trees from tree, entropies and seed.

    Prints the first difference and exits with code 1 if there is one.
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
    """Measure a job's judge (reward.judge) on labelled answers: agreement, and how often hostile answers fool it.

    Prints one JSON object, which has the scores of the rule-based verifiers for comparison.
    """
    from arpo_megatron.rewards.judge.report import report

    print(json.dumps(report(_resolve(recipe, overrides, config, None).reward.judge, labels)), flush=True)


@app.command()
def health(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or the name of a submitted run.")],
    cluster: Annotated[
        str | None, typer.Option(help="Cluster profile that the run was submitted with; searches only its `runs`.")
    ] = None,
) -> None:
    """Show the processes of a running job: state, uptime, number of restarts, last error."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node
    from arpo_megatron.launch.health import print_health

    run_on_login_node(cluster, "health", run)
    if (Path(run) / "config.yaml").is_file() and not (Path(run) / "submissions").is_dir():
        print_health(run_directory.RunDirectory(Path(run)))
    else:
        runs.print_health(runs.find_run(run, cluster))


Gpu = Annotated[str, typer.Option(help="GPU type: h100-80, h200 or a100-80.")]


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
    print(
        "\nAdd variants as RECIPE+VARIANT+...; `arpo show` prints the resulting config, `arpo plan` its memory and time"
    )


@app.command()
def show(recipe: Recipe, overrides: Overrides = None, config: ConfigFile = None, seed: Seed = None) -> None:
    """Print a resolved config with the source of each value: default, base, recipe, variant, file or override."""
    from arpo_megatron.jobs.explain import render

    print(render(recipe, file=config, overrides=_with_seed(overrides, seed)), end="")


@app.command("plan")
def plan_command(
    recipe: Recipe,
    overrides: Overrides = None,
    config: ConfigFile = None,
    gpu: Gpu = "h100-80",
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: the recipe's layout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object.")] = False,
    search: Annotated[bool, typer.Option(help="Also search for better layouts (takes seconds).")] = True,
) -> None:
    """Estimate a job: memory by part, seconds by phase, GPU-hours, and better layouts on the same number of GPUs.

    Exits with code 1 if the job does not fit.
    """
    from arpo_megatron.plan import Hardware, plan, report
    from arpo_megatron.plan.nodes import resolve_on_nodes
    from arpo_megatron.plan.search import search as search_layouts

    hardware = Hardware.named(gpu)
    job = resolve_on_nodes(recipe, nodes, hardware.gpus, file=config, overrides=overrides or ())
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
        raise UserError(f"{path} is not a run directory: it has no config.yaml")
    return run


def _print_plan(config: JobConfig) -> None:
    """Print the resolved config, then the processes and phases in their order."""
    from arpo_megatron.jobs.inputs import check_inputs
    from arpo_megatron.plan.report import layout

    check_inputs(config)
    print(yaml_text(dump_config(config)), end="")
    parallel, train = config.parallel, config.train
    print(f"# plan: a new run in {run_directory.next_path(config)}")
    print("#   sandbox  python -m tools_sandbox")
    engines = "engine " if config.engine.replicas == 1 else f"{config.engine.replicas} engines"
    print(f"#   {engines}  SGLang, tensor parallel {config.engine.tensor}, {config.model.dtype}")
    dimensions = layout(parallel)
    print(f"#   trainer  {parallel.world_size} rank(s){f': {dimensions}' if dimensions else ''}")
    if config.sft.steps:
        print(f"#   cold start: {config.sft.steps} updates of {config.sft.batch} demonstrations")
    print(
        f"#   {config.algorithm.name}: {train.steps} steps of {train.tasks_per_step} tasks x "
        f"{config.algorithm.group_size} trajectories, {config.algorithm.minibatches} update(s) a step"
    )
