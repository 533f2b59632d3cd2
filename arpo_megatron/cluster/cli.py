"""`arpo submit | status | logs | cancel | resume | doctor`: a run on a cluster, by its name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo_megatron import resolve
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError

if TYPE_CHECKING:
    from arpo_megatron.cluster.profile import ClusterProfile

app = typer.Typer()

Recipe = Annotated[str, typer.Argument(help="Recipe name; `arpo recipes` lists them.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe.")]
Cluster = Annotated[str, typer.Option(help="Profile in slurm/clusters, or the path of one (FILE.yaml).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file laid over the recipe, below KEY=VALUE.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of a submitted run, or its directory.")]
Where = Annotated[str | None, typer.Option("--cluster", help="Look in this profile's `runs` only.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes; default: the profile's, or as few as can be.")]
Force = Annotated[bool, typer.Option("--force", help="Also where `arpo plan` says that the job does not fit.")]
Chain = Annotated[int, typer.Option(min=1, help="Jobs, one after the other, that go on where the last one stopped.")]


@app.command()
def submit(
    recipe: Recipe,
    cluster: Cluster,
    overrides: Words = None,
    config: ConfigFile = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print the batch script and the role plan, then stop.")
    ] = False,
) -> None:
    """Train a recipe on a Slurm cluster: one allocation with tool service, engines and trainer as its steps.

    Prints the run's name and the job's id.
    """
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.plan.search import on_nodes

    job, profile = resolve.resolve(recipe, file=config, words=overrides or ()), load_profile(cluster)
    if (hardware := profile.hardware(job)) is not None:
        job = on_nodes(recipe, nodes or profile.nodes, hardware, file=config, words=overrides or ())
    _submit(job, profile, nodes=nodes, chain=chain, force=force, dryrun=dryrun)


@app.command()
def resume(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="train.steps, parallel.*, engine.*, ...")
    ] = None,
    cluster: Where = None,
    nodes: Nodes = None,
    chain: Chain = 1,
    force: Force = False,
) -> None:
    """Submit a run again, with the code as it is now: it goes on from its newest whole checkpoint.

    Without words and --nodes it takes as many nodes as before; number and layout may be others.
    """
    from arpo_megatron.cluster import commands
    from arpo_megatron.cluster.profile import load_profile

    directory = commands.find_run(run, cluster)
    job = resolve.over(resolve.load(directory.config), overrides or ())
    if nodes is None and not overrides:
        nodes = commands.nodes_of(directory)
    _submit(job, load_profile(str(directory.cluster)), nodes=nodes, chain=chain, force=force, resuming=True)


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
    from arpo_megatron.cluster.submit import dry_run, prepare_submission
    from arpo_megatron.cluster.submit import submit as send

    submission = prepare_submission(job, profile, nodes=nodes, chain=chain, resume=resuming)
    if dryrun:
        print(dry_run(submission))
        return
    jobs = send(submission, force=force)
    name = submission.run.path.name
    print(f"{name}: job {', '.join(jobs)}, run directory {submission.run.path}")
    print(f"arpo status {name} | arpo logs {name} --follow | arpo cancel {name}")


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; default: all submitted ones.")] = None,
    cluster: Where = None,
) -> None:
    """Say what Slurm and the run itself report: state, nodes, time, steps done, checkpoints."""
    from arpo_megatron.cluster import commands

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
    from arpo_megatron.cluster import commands

    commands.print_log(commands.find_run(run, cluster), role, lines=lines, follow=follow)


@app.command()
def cancel(run: Run, cluster: Where = None) -> None:
    """Cancel a run's jobs, those that wait in its chain too. `arpo resume` goes on from its newest checkpoint."""
    from arpo_megatron.cluster import commands

    commands.cancel(commands.find_run(run, cluster))


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Look at what this recipe needs, too.")] = None,
    overrides: Words = None,
    cluster: Annotated[str | None, typer.Option(help="Look at this cluster from here, its login node.")] = None,
) -> None:
    """Check this machine, a recipe's files and a cluster before anything is started; a line each, with how to mend.

    Ends with code 1 where a check fails. Every submitted job does the same on all its nodes first.
    """
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.doctor.local import examine

    job = None if recipe is None else resolve.resolve(recipe, words=overrides or ())
    if overrides and recipe is None:
        raise UserError("KEY=VALUE words need a recipe")
    if not examine(job, None if cluster is None else load_profile(cluster)):
        raise typer.Exit(1)
