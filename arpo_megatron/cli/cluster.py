"""`arpo submit`, `cancel`, `resume` and `doctor`: runs on a cluster, addressed by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron.cli.jobs import following
from arpo_megatron.cli.options import (
    ClusterOfRun,
    ConfigFile,
    DryRun,
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
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

if TYPE_CHECKING:
    from arpo_megatron.cluster.profile import ClusterProfile

app = typer.Typer()

Cluster = Annotated[str, typer.Option(help="Cluster profile: a name in slurm/clusters, or a YAML file.")]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Name or directory of a submitted run.", autocompletion=complete_run)
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes; default: the profile's, else the fewest that fit the job.")
]
Force = Annotated[bool, typer.Option("--force", help="Submit even if `arpo plan` expects that the job does not fit.")]
Chain = Annotated[
    int, typer.Option(min=1, help="Number of jobs to queue one after the other; each continues the one before.")
]


Then = Annotated[
    str | None,
    typer.Option(metavar="COMMAND[,COMMAND]", help="Jobs that follow the training: eval, export, or both in order."),
]


@app.command(rich_help_panel=Panel.CLUSTER)
def submit(
    recipe: Recipe,
    cluster: Cluster,
    overrides: Overrides = None,
    config: ConfigFile = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
    dry_run: DryRun = False,
    then: Then = None,
) -> None:
    """Train a recipe on a Slurm cluster, in one allocation for tool service, engines and trainer.

    Prints the name of the run and the id of its job.
    """
    submit_recipe(
        recipe, cluster, overrides or (), config, nodes=nodes, chain=chain, force=force, dry_run=dry_run, then=then
    )


def submit_recipe(
    recipe: str,
    cluster: str,
    overrides: Sequence[str],
    config: Path | None,
    *,
    nodes: int | None = None,
    chain: int = 1,
    force: bool = False,
    dry_run: bool = False,
    then: str | None = None,
    only_sft: bool = False,
) -> None:
    """Do `arpo submit`; with `only_sft` the job ends after the cold start."""
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import run_on_login_node

    commands = following(then)
    options: dict[str, object] = {"config": config, "dry-run": dry_run}
    if only_sft:
        run_on_login_node(cluster, "sft", recipe, *overrides, **options)
    else:
        options |= {"nodes": nodes, "chain": chain, "force": force, "then": then}
        run_on_login_node(cluster, "submit", recipe, *overrides, **options)
    profile = load_profile(cluster)
    job = _resolved(recipe, profile, nodes or profile.nodes, overrides, config)
    if only_sft and job.sft.steps == 0:
        raise UserError(f"recipe {recipe} has no cold start; add one with sft.steps=N")
    _submit(job, profile, nodes=nodes, chain=chain, force=force, dry_run=dry_run, only_sft=only_sft, then=commands)


@app.command(rich_help_panel=Panel.CLUSTER)
def resume(
    run: Run,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster profile to submit with; default: the profile of the last submission."),
    ] = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Submit a run again with the current code. It continues from its newest complete checkpoint.

    The job takes as many nodes as before. --nodes fills that many nodes with more or fewer data-parallel ranks and
    engines. Overrides that change ranks, engines or their placement take the number of GPU nodes that they need.
    """
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import run_on_login_node
    from arpo_megatron.cluster.submissions import config_before_auto
    from arpo_megatron.plan.nodes import scale_to_nodes

    options = {"nodes": nodes, "chain": chain, "force": force, "dry-run": dry_run}
    run_on_login_node(cluster, "resume", run, *(overrides or ()), **options)
    directory = runs.find_run(run, cluster)
    profile = load_profile(cluster or str(directory.cluster))
    explicit = resolve.explicit_keys(resolve.override_layers(overrides or ()))
    before = config_before_auto(directory)
    job = resolve.with_overrides(before, overrides or ())
    gpus = profile.gpus_of(job)
    if nodes is not None and gpus:
        job = scale_to_nodes(job, nodes, gpus, keep=explicit)
    elif nodes is None and not (gpus and _layout(job) != _layout(before)):
        nodes = runs.nodes_of(directory)
    _submit(job, profile, nodes=nodes, chain=chain, force=force, dry_run=dry_run, resuming=True)


def _layout(job: JobConfig) -> tuple[object, ...]:
    """Return the config values that decide how many GPU nodes a job takes."""
    engine = job.engine
    return job.parallel.world_size, engine.tensor, engine.replicas, engine.placement


def _resolved(
    recipe: str, profile: "ClusterProfile | None", nodes: int | None, overrides: Sequence[str], file: Path | None = None
) -> JobConfig:
    """Return the job laid out on `nodes` nodes of the cluster, or as the recipe has it if `nodes` is None."""
    from arpo_megatron.plan.nodes import resolve_on_nodes

    job = resolve.resolve(recipe, file=file, overrides=overrides)
    if nodes is not None and profile is not None and profile.gpus_of(job):
        # Resolve again: the layout for this number of nodes goes between the recipe and the overrides.
        job = resolve_on_nodes(recipe, nodes, profile.gpus_of(job), file=file, overrides=overrides)
    return job


def _submit(
    job: JobConfig,
    profile: "ClusterProfile",
    *,
    nodes: int | None,
    chain: int,
    force: bool,
    dry_run: bool = False,
    resuming: bool = False,
    only_sft: bool = False,
    then: Sequence[str] = (),
) -> None:
    """Submit a job and those that follow it, or print what would be submitted."""
    from arpo_megatron.cluster import submit as submitting
    from arpo_megatron.cluster.runs import address, address_words
    from arpo_megatron.cluster.submit_run import submit_run

    if dry_run:
        submission = submitting.prepare_submission(
            job, profile, nodes=nodes, chain=chain, resume=resuming, only_sft=only_sft
        )
        print(submitting.dry_run(submission))
        if then:
            print(f"# then, after this job: {', '.join(f'arpo {each}' for each in then)}")
        next_after_dry_run()
        return
    submitted = submit_run(
        job, profile, nodes=nodes, chain=chain, resume=resuming, only_sft=only_sft, then=then, force=force
    )
    print(submitted)
    name = address(submitted.run)
    print(f"arpo status {name} | arpo logs {name} --follow | arpo cancel {name}")
    next_command("arpo", "logs", *address_words(submitted.run), "--follow")


@app.command(rich_help_panel=Panel.CLUSTER)
@with_dry_run
def cancel(run: Run, cluster: ClusterOfRun = None) -> None:
    """Cancel all jobs of a run, including the queued ones of its chain. `arpo resume` continues the run."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "cancel", run)
    runs.cancel(runs.find_run(run, cluster))
    next_command("arpo", "resume", run)


@app.command(rich_help_panel=Panel.START)
@with_dry_run
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Also check the files and the layout of this recipe.")] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(help="Check the cluster of this profile; run it on the login node.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Then measure network, filesystem and host copies in a job of the profile's `nodes`, else of two, and "
            "write them to the profile. Plans use them.",
        ),
    ] = False,
) -> None:
    """Check this machine, a recipe and a cluster before a job starts. Each problem is one line with its fix.

    Exits with code 1 if a check fails. Every submitted job runs the same checks on all its nodes first.
    """
    from arpo_megatron.cli.doctor import examine
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import login_node, run_on_login_node

    if measure and (cluster is None or login_node(cluster) is not None):
        raise UserError("--measure needs --cluster NAME, on the cluster's login node: it writes to the profile there")
    run_on_login_node(cluster, "doctor", recipe, *(overrides or ()))
    if overrides and recipe is None:
        raise UserError("KEY=VALUE needs a recipe: arpo doctor RECIPE KEY=VALUE")
    profile = None if cluster is None else load_profile(cluster)
    job = None if recipe is None else _resolved(recipe, profile, profile.nodes if profile else None, overrides or ())
    if not examine(job, profile):
        next_command(*own_command())
        raise typer.Exit(1)
    if measure and profile is not None and cluster is not None:
        _measure(cluster, profile)
    if recipe is None:
        next_command("arpo", "demo")
    elif cluster is None:
        next_command("arpo", "train", *job_words(recipe, overrides))
    else:
        next_command("arpo", "submit", *job_words(recipe, overrides), "--cluster", cluster)


def _measure(cluster: str, profile: "ClusterProfile") -> None:
    from arpo_megatron.cluster import measure
    from arpo_megatron.cluster.profile import read_profile

    nodes = profile.nodes or 2
    print(f"measuring on {nodes} node(s), as soon as Slurm has them")
    speeds = measure.measure(profile, nodes)
    _, path = read_profile(cluster)
    measure.keep(Path(path), speeds, nodes)
    for key, speed in speeds.items():
        print(f"{key}: {speed:.3g}, in {path}")
