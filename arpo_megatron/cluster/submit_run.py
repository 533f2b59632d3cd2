"""`arpo submit` as a Python function.

    from arpo_megatron.cluster.submit_run import submit_run
    from arpo_megatron.jobs.resolve import resolve

    job = resolve("deepsearch_14b+4nodes", overrides=["train.steps=10"])
    print(submit_run(job, "h100", then=["export", "eval"]))

It runs on a login node, in the clone whose code is submitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arpo_megatron.cluster.commands import submit_command
from arpo_megatron.cluster.profile import ClusterProfile, load_profile
from arpo_megatron.cluster.submit import prepare_submission, submit_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run whose jobs are in Slurm's queue."""

    run: RunDirectory
    jobs: tuple[str, ...]
    """Ids of the jobs that train, in order."""
    following: tuple[tuple[str, str], ...] = ()
    """Command and job id of each job that follows."""

    def __str__(self) -> str:
        name = self.run.path.name
        first = f"{name}: job {', '.join(self.jobs)}, run directory {self.run.path}"
        then = [f"{name}: job {job} then runs arpo {command}" for command, job in self.following]
        return "\n".join([first, *then])


def submit_run(
    job: JobConfig,
    cluster: str | ClusterProfile,
    *,
    nodes: int | None = None,
    chain: int = 1,
    then: Sequence[str] = (),
    resume: bool = False,
    only_sft: bool = False,
    force: bool = False,
) -> SubmittedRun:
    """Submit a job, and jobs that follow it.

    Args:
        job: config of the job, with the layout for its nodes.
        cluster: name or file of a profile, or a profile.
        nodes: number of nodes; None for the profile's (only for a new run), or as few as the job takes.
        chain: number of jobs to queue one after the other; each continues the one before.
        then: commands that follow, each after the job before it: eval, export.
        resume: continue the run of this config instead of starting one.
        only_sft: end after the cold start.
        force: submit even if the plan expects that the job does not fit, or that Slurm's signal comes too late.

    Raises:
        UserError: the job does not fit the nodes or their GPUs, Slurm refuses it, an input or a secret is missing, or
            the profile names a login node to be reached over SSH.
        Interrupted: see `submit_jobs`.
    """
    profile = load_profile(cluster) if isinstance(cluster, str) else cluster
    if profile.ssh is not None:
        raise UserError(f"only `arpo submit` reaches the login node {profile.ssh} over SSH: use it, or submit there")
    submission = prepare_submission(job, profile, nodes=nodes, chain=chain, resume=resume, only_sft=only_sft)
    jobs = submit_jobs(submission, force=force)
    submitted = SubmittedRun(submission.run, tuple(jobs))
    after = jobs
    for command in then:
        try:
            number = submit_command(submission.run, profile, [command, str(submission.run.path)], after)
        except UserError as error:
            raise UserError(f"{command}: {error}; submitted before it: {submitted}") from None
        submitted = replace(submitted, following=(*submitted.following, (command, number)))
        after = [number]
    return submitted
