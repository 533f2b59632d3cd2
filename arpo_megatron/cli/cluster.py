"""`arpo submit | status | logs | cancel | resume | doctor`: a run on a cluster, by its name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

if TYPE_CHECKING:
    from arpo_megatron.cluster.profile import ClusterProfile

app = typer.Typer()

Recipe = Annotated[str, typer.Argument(help="Recipe name; `arpo recipes` lists them.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe.")]
Cluster = Annotated[str, typer.Option(help="Profile in slurm/clusters, or the path of one (FILE.yaml).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file laid over the recipe, below KEY=VALUE.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of a submitted run, or its directory.")]
Where = Annotated[
    str | None,
    typer.Option("--cluster", help="Look in this profile's `runs` only (over SSH, where it says so)."),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes; default: the profile's, or as few as can be.")]
Force = Annotated[bool, typer.Option("--force", help="Also where `arpo plan` says that the job does not fit.")]
Chain = Annotated[int, typer.Option(min=1, help="Jobs, one after the other, that go on where the last one stopped.")]


@app.command()
def submit(
    recipe: Recipe,
    cluster: Cluster,
    overrides: Overrides = None,
    config: ConfigFile = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print the batch script and the node layout, then stop.")
    ] = False,
) -> None:
    """Train a recipe on a Slurm cluster: one allocation with tool service, engines and trainer as its steps.

    Prints the run's name and the job's id.
    """
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import elsewhere

    options = {"config": config, "nodes": nodes, "chain": chain, "force": force, "dryrun": dryrun}
    elsewhere(cluster, "submit", recipe, *(overrides or ()), **options)
    profile = load_profile(cluster)
    job = _resolved(recipe, profile, nodes or profile.nodes, overrides or (), config)
    _submit(job, profile, nodes=nodes, chain=chain, force=force, dryrun=dryrun)


@app.command()
def resume(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="train.steps, parallel.*, engine.*, ...")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Profile to submit with, in whose `runs` the run is; default: as it was submitted last."),
    ] = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
) -> None:
    """Submit a run again, with the code as it is now: it goes on from its newest whole checkpoint.

    The job takes as many nodes as before. --nodes fills that many nodes with more or fewer data-parallel ranks and
    engines. Overrides that change ranks, engines or their placement take the number of GPU nodes that they need.
    """
    from arpo_megatron.cluster import runs as commands
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import elsewhere
    from arpo_megatron.cluster.submissions import config_said
    from arpo_megatron.plan.nodes import scaled

    elsewhere(cluster, "resume", run, *(overrides or ()), nodes=nodes, chain=chain, force=force)
    directory = commands.find_run(run, cluster)
    profile = load_profile(cluster or str(directory.cluster))
    said = resolve.explicit_keys(resolve.override_layers(overrides or ()))
    before = config_said(directory)
    job = resolve.with_overrides(before, overrides or ())
    gpus = profile.gpus_of(job)
    if nodes is not None and gpus:
        job = scaled(job, nodes, gpus, keep=said)
    elif nodes is None and not (gpus and _layout(job) != _layout(before)):
        nodes = commands.nodes_of(directory)
    _submit(job, profile, nodes=nodes, chain=chain, force=force, resuming=True)


def _layout(job: JobConfig) -> tuple[object, ...]:
    """What decides how many nodes with GPUs a job takes."""
    engine = job.engine
    return job.parallel.world_size, engine.tensor, engine.replicas, engine.placement


def _resolved(
    recipe: str, profile: "ClusterProfile | None", nodes: int | None, overrides: Sequence[str], file: Path | None = None
) -> JobConfig:
    """The job on so many nodes of the cluster; None: as the recipe has it."""
    from arpo_megatron.plan.nodes import on_nodes

    job = resolve.resolve(recipe, file=file, overrides=overrides)
    if nodes is not None and profile is not None and profile.gpus_of(job):
        # Once more, because a layout for so many nodes lies between the recipe and the overrides.
        job = on_nodes(recipe, nodes, profile.gpus_of(job), file=file, overrides=overrides)
    return job


def _submit(
    job: JobConfig,
    profile: "ClusterProfile",
    *,
    nodes: int | None,
    chain: int,
    force: bool,
    dryrun: bool = False,
    resuming: bool = False,
) -> None:
    from arpo_megatron.cluster.runs import address
    from arpo_megatron.cluster.submit import dry_run, prepare_submission
    from arpo_megatron.cluster.submit import submit as send

    submission = prepare_submission(job, profile, nodes=nodes, chain=chain, resume=resuming)
    if dryrun:
        print(dry_run(submission))
        return
    jobs = send(submission, force=force)
    run, found = submission.run, address(submission.run)
    print(f"{run.path.name}: job {', '.join(jobs)}, run directory {run.path}")
    print(f"arpo status {found} | arpo logs {found} --follow | arpo cancel {found}")


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; default: all submitted ones.")] = None,
    cluster: Where = None,
) -> None:
    """Say what Slurm and the run itself report: state, nodes, time, steps done, checkpoints."""
    from arpo_megatron.cluster import runs as commands
    from arpo_megatron.cluster.ssh import elsewhere

    elsewhere(cluster, "status", run)
    commands.print_status(run, cluster)


@app.command()
def logs(
    run: Run,
    role: Annotated[str, typer.Option(help="job, doctor, train, sft, engine, sandbox, rollout, ...")] = "job",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until the job has ended.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="How many of the last lines.")] = 40,
    cluster: Where = None,
) -> None:
    """Print the log of a role of a submitted run."""
    from arpo_megatron.cluster import runs as commands
    from arpo_megatron.cluster.ssh import elsewhere

    elsewhere(cluster, "logs", run, role=role, follow=follow, lines=lines)
    commands.print_log(commands.find_run(run, cluster), role, lines=lines, follow=follow)


@app.command()
def cancel(run: Run, cluster: Where = None) -> None:
    """Cancel a run's jobs, those that wait in its chain too. `arpo resume` goes on from its newest checkpoint."""
    from arpo_megatron.cluster import runs as commands
    from arpo_megatron.cluster.ssh import elsewhere

    elsewhere(cluster, "cancel", run)
    commands.cancel(commands.find_run(run, cluster))


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Look at what this recipe needs, too.")] = None,
    overrides: Overrides = None,
    cluster: Annotated[str | None, typer.Option(help="Look at this cluster from here, its login node.")] = None,
) -> None:
    """Check this machine, a recipe's files and a cluster before anything is started; a line each, with how to mend.

    Ends with code 1 where a check fails. Every submitted job does the same on all its nodes first.
    """
    from arpo_megatron.cli.doctor import examine
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import elsewhere

    elsewhere(cluster, "doctor", recipe, *(overrides or ()))

    if overrides and recipe is None:
        raise UserError("KEY=VALUE needs a recipe")
    profile = None if cluster is None else load_profile(cluster)
    job = None if recipe is None else _resolved(recipe, profile, profile.nodes if profile else None, overrides or ())
    if not examine(job, profile):
        raise typer.Exit(1)
