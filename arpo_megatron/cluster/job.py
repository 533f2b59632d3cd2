"""The role supervisor, the first process of a Slurm allocation (`python -m arpo_megatron.cluster RUN_DIR`).

Doctor, preparation, cold start and training are steps of the allocation (`site.py`), watched as on one machine:
services are restarted within limits, the first fatal exit ends all. How it ends:

| what happens | what is done | the job is then |
| --- | --- | --- |
| training is done | links of the chain that still wait are cancelled | COMPLETED |
| USR1: time is nearly up, or a preemption | trainer saves and ends; a waiting link goes on | COMPLETED |
| the same, and no link waits | the job goes back into the queue | PENDING |
| a fatal exit | all steps are ended; the last lines of the guilty log | FAILED, exit code 1 |
| something that the user can mend | one line | FAILED, exit code 2 |
| TERM: scancel | all steps are ended | CANCELLED |
| TERM: a preemption without warning | the same, and back into the queue | PENDING |
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from arpo_megatron import resolve
from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.plan import plan_roles
from arpo_megatron.cluster.profile import ClusterProfile, load_profile
from arpo_megatron.cluster.site import SlurmSite, drop_slurm_variables
from arpo_megatron.cluster.submissions import waiting_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.doctor.job import examine_nodes
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.job import train_phases, watching
from arpo_megatron.processes import Interrupted, RoleDiedError, Roles, StoppedError, interrupt_on_signals
from arpo_megatron.rollout.server import free_ports
from arpo_megatron.run_directory import RunDirectory
from tools_sandbox.config import TOKEN_VARIABLE

UNFINISHED = 75
"""Exit code (EX_TEMPFAIL) of a job whose time was up, and that nobody goes on with."""
TERMINATED = 128 + signal.SIGTERM
_END_S = 60.0


def supervise(path: Path, warned: Sequence[int]) -> int:
    """Run the job to one of its ends; returns its exit code.

    Args:
        path: of the run directory.
        warned: not empty if Slurm's warning has come already.
    """
    run = RunDirectory(path)
    job_id, node_list = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
    drop_slurm_variables()
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    nodes = slurm.allocated_nodes(node_list)
    site = SlurmSite(profile, plan_roles(config, profile.gpus_per_node, len(nodes)), nodes, run, job_id)
    code = 0
    try:
        interrupt_on_signals()
        _run(config, run, site, warned)
        for waiting in waiting_jobs(run):
            slurm.call("scancel", waiting, check=False)
    except StoppedError:
        code = _leave_to_others(run, profile, job_id)
    except UserError as error:
        code = _told(error, USER_ERROR_EXIT_CODE)
    except RoleDiedError as error:
        code = _told(error, 1)
        if profile.requeue and (lost := site.lost_nodes()):  # Slurm itself would notice minutes later
            _told(UserError(f"{', '.join(lost)} cannot be reached any more"), 1)
            code = _requeue(job_id)
    except Interrupted:
        code = _requeue(job_id) if profile.requeue and _still_wanted(job_id) else TERMINATED
    return code


def _run(config: JobConfig, run: RunDirectory, site: SlurmSite, warned: Sequence[int]) -> None:
    nodes = site.nodes
    _take_secrets(site.profile)
    with run.locked(), watching(run) as (progress, poll), Roles(run.logs) as roles:
        run.remove_partial()  # what a kill -9 left

        def save_and_end(*_: object) -> None:
            run.stop.touch()
            progress.note("Slurm's warning: the trainer saves and ends")

        signal.signal(signal.SIGUSR1, save_and_end)
        if warned:
            save_and_end()
        progress.note(f"job {site.job_id} on {', '.join(node.name for node in nodes)}")
        for line in site.plan.describe():
            progress.note(line)
        progress.phase("doctor")
        (meeting,) = free_ports(1, nodes[0].address, site.profile.ports)
        examine_nodes(site, roles, meeting, poll)
        progress.phase("prepare")
        words = site.python([sys.executable, "-m", "arpo_megatron.cluster.prepare", str(run.path)])
        roles.wait(roles.start("prepare", site.step("prepare", nodes[:1], 1, words)), poll=poll)
        train_phases(config, run, roles, progress, poll, site)
        progress.note(f"exported to {run.export}")


def _take_secrets(profile: ClusterProfile) -> None:
    """Into this process's environment, which srun hands to every step; they are written nowhere."""
    for name, source in profile.secrets.items():
        if source != "env":
            try:
                os.environ[name] = Path(source).expanduser().read_text(encoding="utf-8").strip()
            except OSError as error:
                raise UserError(f"the secret {name} cannot be read from {source}: {error.strerror}") from None
        elif not os.environ.get(name):
            raise UserError(f"the secret {name} is not in the environment that sbatch handed over")
    # Other nodes reach the tool service, so it must know its callers.
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(32))


def _told(error: Exception, code: int) -> int:
    print(f"arpo: {error}", file=sys.stderr, flush=True)
    return code


def _leave_to_others(run: RunDirectory, profile: ClusterProfile, job_id: str) -> int:
    """All is saved: the next link of the chain goes on, or this job itself after a requeue."""
    if waiting := waiting_jobs(run):
        return _told(StoppedError(f"saved; job {waiting[0]} goes on"), 0)
    if profile.requeue:
        return _requeue(job_id)
    return _told(StoppedError("saved; `arpo resume` goes on"), UNFINISHED)


def _still_wanted(job_id: str) -> bool:
    """A job that was cancelled or whose time is up is no longer RUNNING; one that is to be preempted is."""
    state = slurm.job_state(job_id)
    return state is not None and state.state in ("RUNNING", "SIGNALING")


def _requeue(job_id: str) -> int:
    """Slurm ends this process and starts the job again later, from its newest whole checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _told(StoppedError("back into the queue"), 0)
    slurm.call("scontrol", "requeue", job_id)
    time.sleep(_END_S)
    return UNFINISHED
