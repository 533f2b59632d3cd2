"""The `arpo` command line. torch and other slow packages are imported only by the commands that need them."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from arpo_megatron.cli.bench import app as bench
from arpo_megatron.cli.cluster import app as cluster
from arpo_megatron.cli.cluster import submit_recipe
from arpo_megatron.cli.data import app as data
from arpo_megatron.cli.evaluation import app as evaluation
from arpo_megatron.cli.jobs import submit_command
from arpo_megatron.cli.lists import app as lists
from arpo_megatron.cli.lists import recipes
from arpo_megatron.cli.look import app as look
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
    open_run,
    own_command,
)
from arpo_megatron.cli.replay import app as replay
from arpo_megatron.cli.serve import app as serve
from arpo_megatron.cli.study import app as study
from arpo_megatron.cli.view import app as view
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.jobs import choose_run, resolve
from tools_sandbox.utils.yaml import yaml_text

if TYPE_CHECKING:
    from arpo_megatron.plan import Hardware

app = typer.Typer(
    name="arpo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train tool-using language models with ARPO. Start with [bold]arpo demo[/bold]: in a few minutes on two CPU "
    "cores, a tiny agent learns to use its tools.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        from arpo_megatron.utils.code_version import code_version

        print(f"arpo-megatron {metadata.version('arpo-megatron')}, {code_version()}")
        raise typer.Exit


Resume = Annotated[bool, typer.Option("--resume", help="Continue the newest run of this config from its last step.")]
Restarts = Annotated[
    int, typer.Option(min=0, help="How often to resume the job by itself after one of its processes has died.")
]
Seed = Annotated[int | None, typer.Option(help="Random seed of the whole job; the same as seed=N.")]


@app.callback()
def arpo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Define the options that stand before the command."""


@app.command(rich_help_panel=Panel.START)
def demo(
    overrides: Overrides = None,
    seed: Seed = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Algorithm preset: arpo, or grpo, random or arpo_released to compare with.")
    ] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    restarts: Restarts = 0,
    dry_run: DryRun = False,
) -> None:
    """Run the whole pipeline at laptop size: cold start, evaluation, ARPO, evaluation, export, one answered question.

    The last line of standard output is a JSON object with the results.
    """
    overrides = [*([] if algorithm is None else [f"algorithm.name={algorithm}"]), *(overrides or ())]
    job = _resolve("quickstart", overrides, config, seed)
    if dry_run:
        _print_plan(job, resume)
        return next_after_dry_run()
    from arpo_megatron.launch.demo import run_demo

    print(json.dumps(run_demo(job, resume=resume, restarts=restarts)), flush=True)
    return None


def _start_train(job: JobConfig, resume: bool, restarts: int) -> None:
    from arpo_megatron.launch.job import run_job

    run_job(job, resume=resume, restarts=restarts)


def _start_sft(job: JobConfig, resume: bool, restarts: int) -> None:
    from arpo_megatron.launch.job import run_sft

    print(json.dumps(run_sft(job, resume=resume, restarts=restarts)), flush=True)


def _recipe_command(name: str, text: str, start: Callable[[JobConfig, bool, int], None]) -> None:
    """Register a command that runs a recipe. All of these commands take the same arguments and options."""

    @app.command(name, help=text, rich_help_panel=Panel.TRAIN)
    def command(
        recipe: Recipe,
        overrides: Overrides = None,
        config: ConfigFile = None,
        seed: Seed = None,
        resume: Resume = False,
        restarts: Restarts = 0,
        dry_run: DryRun = False,
        cluster: OnCluster = None,
    ) -> None:
        if cluster is not None:
            if resume:
                raise UserError("--resume continues a run on this machine; `arpo resume RUN` submits one again")
            submit_recipe(recipe, cluster, _with_seed(overrides, seed), config, dry_run=dry_run, only_sft=name == "sft")
            return
        job = _resolve(recipe, overrides, config, seed)
        if name == "sft" and job.sft.steps == 0:
            raise UserError(f"recipe {recipe} has no cold start; add one with sft.steps=N")
        if dry_run:
            _print_plan(job, resume)
            next_after_dry_run()
        else:
            start(job, resume, restarts)


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


RunPath = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR",
        help="Run directory; with --cluster also the name of a submitted run.",
        autocompletion=complete_run,
    ),
]


@app.command(rich_help_panel=Panel.TRAIN)
def export(
    run_dir: RunPath,
    out: Annotated[
        Path | None,
        typer.Option(help="Hugging Face directory to write, which must not exist; default: RUN_DIR/exports/step_N."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Serve it, ask one question, and compare with transformers' log-probs.")
    ] = False,
    repo: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Also upload it to the Hugging Face Hub (HF_TOKEN)."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push-to-hub: a new repository is public.")] = False,
    dry_run: DryRun = False,
    cluster: OnCluster = None,
) -> None:
    """Convert a checkpoint of a run to a Hugging Face directory that transformers and SGLang can load.

    One process reads the weights layer by layer, on CPUs, whatever the number of ranks that wrote them.
    """
    if public and repo is None:
        raise UserError("--public is for a repository on the hub: name it with --push-to-hub, or leave out --public")
    if cluster is not None:
        if verify:
            raise UserError("--verify starts services on this machine: leave out --cluster")
        if repo is not None:
            raise UserError("--push-to-hub uploads from this machine: leave out --cluster")
        return submit_command(cluster, "export", run_dir, out=out, step=step, dry_run=dry_run)
    from arpo_megatron.launch.job import export_checkpoint, find_export

    run = open_run(Path(run_dir))
    if dry_run:
        found, written = find_export(run, out, step)
        print(f"checkpoint of step {found} -> {written}")
        if verify:
            print("then serve it, ask one question, and compare log-probs with transformers")
        if repo is not None:
            print(f"then upload it to {repo} ({'public' if public else 'private'} if it is new)")
        return next_after_dry_run()
    if repo is not None:
        from arpo_megatron.launch.push_to_hub import check_hub, push_to_hub

        check_hub(repo)
    written = export_checkpoint(run, out, step)
    print(written, flush=True)
    if verify:
        from arpo_megatron.launch.verify_export import verify_export

        print(verify_export(resolve.load(run.config), run, written).line)
    if repo is not None:
        print(push_to_hub(written, repo, private=not public), flush=True)
    next_command("arpo", "serve", written)
    return None


Gpu = Annotated[
    str | None, typer.Option(help="GPU type: h100-80, h200, a100-80 or l40s; default: that of the recipe's layout.")
]


@app.command(rich_help_panel=Panel.START)
def show(recipe: Recipe, overrides: Overrides = None, config: ConfigFile = None, seed: Seed = None) -> None:
    """Print a resolved config with the source of each value: default, base, recipe, variant, file or override."""
    from arpo_megatron.jobs.explain import render

    print(render(recipe, file=config, overrides=_with_seed(overrides, seed)), end="")
    next_command("arpo", "plan", *job_words(recipe, _with_seed(overrides, seed), config))


@app.command("plan", rich_help_panel=Panel.START)
def plan_command(
    recipe: Recipe,
    overrides: Overrides = None,
    config: ConfigFile = None,
    gpu: Gpu = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: the recipe's layout.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster profile whose GPUs and speeds to plan for, instead of --gpu.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object.")] = False,
    search: Annotated[bool, typer.Option(help="Also search for better layouts (takes seconds).")] = True,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Simulate rollouts to choose admission, priority and staleness (minutes)."),
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Plan with the config of this run, and print the seconds of its steps next to the plan's.",
            autocompletion=complete_run,
        ),
    ] = None,
) -> None:
    """Estimate a job: memory by part, seconds by phase, GPU-hours, and better layouts on the same number of GPUs.

    Exits with code 1 if the job does not fit, and with 2 if its layout cannot divide the model.
    """
    from arpo_megatron.plan import Hardware, plan, report
    from arpo_megatron.plan.measured import measured_seconds
    from arpo_megatron.plan.nodes import resolve_on_nodes
    from arpo_megatron.plan.recommend import recommend
    from arpo_megatron.plan.search import search as search_layouts

    hardware = Hardware.named(gpu or resolve.gpu_of(recipe)) if cluster is None else _hardware_of(cluster)
    run = None if measured is None else open_run(measured)
    if run is not None and config is not None:
        raise UserError("--measured plans with the run's own config: leave out --config")
    file = config if run is None else run.config
    job = resolve_on_nodes(recipe, nodes, hardware.gpus, file=file, overrides=overrides or ())
    if simulate and job.sft_only:
        raise UserError(f"--simulate: {job.name} only does supervised training, which has no rollouts: leave it out")
    found = plan(job, hardware, nodes)
    taken = None if run is None else measured_seconds(run, sft=found.config.sft_only)
    others = search_layouts(found.config, hardware) if search else None
    rollouts = recommend(found) if simulate else None
    if as_json:
        simulated = rollouts.to_dict() if rollouts else {}
        steps = {} if taken is None else {"measured_seconds_by_phase": taken}
        print(json.dumps({**found.to_dict(), "best": [], **(others.to_dict() if others else {}), **simulated, **steps}))
    else:
        print(report.render(found, taken), end="" if others is None else "\n")
        if others is not None:
            print(report.render_search(others), end="")
        if rollouts is not None:
            print("\n" + rollouts.render(), end="")
    if not found.fits:
        next_command(*own_command("--nodes", str(2 * found.nodes)))
        raise typer.Exit(1)
    more = [] if nodes is None else ["--nodes", nodes]
    job_named = job_words(recipe, overrides, config)
    next_command("arpo", "submit", *job_named, "--cluster", cluster or "NAME", *more, "--dry-run")


def _hardware_of(cluster: str) -> "Hardware":
    from arpo_megatron.cluster.profile import load_profile

    if (found := load_profile(cluster).hardware()) is None:
        raise UserError(f"--cluster {cluster}: its profile has no `gpu` to plan for: set it, or give --gpu")
    return found


def _resolve(recipe: str, overrides: Sequence[str] | None, config: Path | None, seed: int | None) -> JobConfig:
    return resolve.resolve(recipe, file=config, overrides=_with_seed(overrides, seed))


def _with_seed(overrides: Sequence[str] | None, seed: int | None) -> list[str]:
    return [*(overrides or ()), *([] if seed is None else [f"seed={seed}"])]


def _print_plan(config: JobConfig, resume: bool) -> None:
    """Print the resolved config, then the processes and phases in their order. Raises UserError like the job."""
    from arpo_megatron.jobs.inputs import check_inputs
    from arpo_megatron.launch.tool_check import check_tools_of
    from arpo_megatron.plan.report import layout

    resumed = choose_run.existing(config) if resume else None
    check_inputs(config, resumed)
    if resumed:
        place = f"{resumed.path}, resumed"
    else:
        choose_run.check_fresh(config)
        place = f"a new run in {choose_run.next_path(config)}"
    check_tools_of(config, resumed)
    print(yaml_text(dump_config(config)), end="")
    parallel, train = config.parallel, config.train
    print(f"# plan: {place}")
    given = ", ".join(config.sandbox.urls)
    print(f"#   sandbox  {f'{given}, not started' if given else 'python -m tools_sandbox'}")
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


# After the commands above: this is the order of the help.
app.add_typer(data, name="data", rich_help_panel=Panel.START)
app.add_typer(lists, name="list", rich_help_panel=Panel.START)
for family in (look, view, evaluation, serve, cluster):
    app.add_typer(family)
app.add_typer(bench, name="bench", rich_help_panel=Panel.MEASURE)
app.add_typer(study, name="study", rich_help_panel=Panel.MEASURE)
app.add_typer(replay)
app.command("recipes", hidden=True)(recipes)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Raises:
        UserError: the arguments cannot be parsed, or the command raises it.
    """
    for place, each in enumerate(arguments):
        if found := re.fullmatch(r"--((?:\w+\.)+\w+)(=.*)?", each, re.DOTALL):
            value = [] if found[2] else list(arguments[place + 1 : place + 2])
            wanted = f"{found[1]}{found[2] or '=' + (value or ['VALUE'])[0]}"
            raise UserError(f"{' '.join([each, *value])}: an override has no dashes: write {wanted}")
    try:
        code = app(args=list(arguments), prog_name="arpo", standalone_mode=False)
    except TyperException as error:
        text = " ".join(error.format_message().split()).removesuffix(".")
        if not text:  # a group without a command has printed its help
            return USER_ERROR_EXIT_CODE
        context = getattr(error, "ctx", None)
        help_of = "arpo" if context is None else context.command_path
        raise UserError(f"{text[0].lower()}{text[1:]}; see `{help_of} --help`") from None
    return code if isinstance(code, int) else 0
