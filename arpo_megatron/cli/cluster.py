"""`arpo submit`, `status`, `logs`, `cancel`, `resume` and `doctor`: runs on a cluster, addressed by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron.cli.options import ConfigFile, Overrides, Recipe
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

if TYPE_CHECKING:
    from arpo_megatron.cluster.profile import ClusterProfile

app = typer.Typer()

Cluster = Annotated[str, typer.Option(help="Cluster profile: a name in slurm/clusters, or a YAML file.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name or directory of a submitted run.")]
ClusterOfRun = Annotated[
    str | None,
    typer.Option("--cluster", help="Cluster profile that the run was submitted with; searches only its `runs`."),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes; default: the profile's, else the fewest that fit the job.")
]
Force = Annotated[bool, typer.Option("--force", help="Submit even if `arpo plan` expects that the job does not fit.")]
Chain = Annotated[
    int, typer.Option(min=1, help="Number of jobs to queue one after the other; each continues the one before.")
]


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
        bool, typer.Option("--dry-run", help="Print the batch script and the node layout, then stop.")
    ] = False,
) -> None:
    """Train a recipe on a Slurm cluster, in one allocation for tool service, engines and trainer.

    Prints the name of the run and the id of its job.
    """
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import run_on_login_node

    options = {"config": config, "nodes": nodes, "chain": chain, "force": force, "dry-run": dryrun}
    run_on_login_node(cluster, "submit", recipe, *(overrides or ()), **options)
    profile = load_profile(cluster)
    job = _resolved(recipe, profile, nodes or profile.nodes, overrides or (), config)
    _submit(job, profile, nodes=nodes, chain=chain, force=force, dryrun=dryrun)


@app.command()
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

    run_on_login_node(cluster, "resume", run, *(overrides or ()), nodes=nodes, chain=chain, force=force)
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
    _submit(job, profile, nodes=nodes, chain=chain, force=force, resuming=True)


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
    dryrun: bool = False,
    resuming: bool = False,
) -> None:
    from arpo_megatron.cluster.runs import address
    from arpo_megatron.cluster.submit import dry_run, prepare_submission, submit_jobs

    submission = prepare_submission(job, profile, nodes=nodes, chain=chain, resume=resuming)
    if dryrun:
        print(dry_run(submission))
        return
    jobs = submit_jobs(submission, force=force)
    run, name = submission.run, address(submission.run)
    print(f"{run.path.name}: job {', '.join(jobs)}, run directory {run.path}")
    print(f"arpo status {name} | arpo logs {name} --follow | arpo cancel {name}")


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name or directory of a run; default: all submitted runs.")
    ] = None,
    cluster: ClusterOfRun = None,
) -> None:
    """Show the state of submitted runs: Slurm's state, nodes, time, finished steps, checkpoints."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "status", run)
    runs.print_status(run, cluster)


@app.command()
def logs(
    run: Run,
    role: Annotated[
        str, typer.Option(help="Process of the job: job (its supervisor), doctor, train, sft, engine-0, sandbox, ...")
    ] = "job",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="Number of last lines to print first.")] = 40,
    cluster: ClusterOfRun = None,
) -> None:
    """Print the log of one process of a submitted run."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "logs", run, role=role, follow=follow, lines=lines)
    runs.print_log(runs.find_run(run, cluster), role, lines=lines, follow=follow)


@app.command()
def cancel(run: Run, cluster: ClusterOfRun = None) -> None:
    """Cancel all jobs of a run, including the queued ones of its chain. `arpo resume` continues the run."""
    from arpo_megatron.cluster import runs
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "cancel", run)
    runs.cancel(runs.find_run(run, cluster))


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Also check the files and the layout of this recipe.")] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(help="Check the cluster of this profile; run it on the login node.")
    ] = None,
) -> None:
    """Check this machine, a recipe and a cluster before a job starts. Each problem is one line with its fix.

    Exits with code 1 if a check fails. Every submitted job runs the same checks on all its nodes first.
    """
    from arpo_megatron.cli.doctor import examine
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.ssh import run_on_login_node

    run_on_login_node(cluster, "doctor", recipe, *(overrides or ()))
    if overrides and recipe is None:
        raise UserError("KEY=VALUE needs a recipe: arpo doctor RECIPE KEY=VALUE")
    profile = None if cluster is None else load_profile(cluster)
    job = None if recipe is None else _resolved(recipe, profile, profile.nodes if profile else None, overrides or ())
    if not examine(job, profile):
        raise typer.Exit(1)
