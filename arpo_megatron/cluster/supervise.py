"""The role supervisor, the first process of a Slurm allocation (`python -m arpo_megatron.cluster RUN_DIR`).

Doctor, preparation, cold start and training are steps of the allocation (`backend.py`), watched as on one machine:
services are restarted within limits, the first fatal exit ends all. How it ends:

| what happens | what is done | the job is then |
| --- | --- | --- |
| training is done | links of the chain that still wait are cancelled | COMPLETED |
| USR1: time is nearly up, or a preemption | trainer saves and ends; a waiting link goes on | COMPLETED |
| the same, and no link waits | the job goes back into the queue | PENDING |
| the same, and Slurm or the profile refuses a requeue | one line; `arpo resume` goes on | FAILED, exit code 75 |
| a fatal exit | all steps end; the last lines of the guilty log; a waiting link goes on | FAILED, code of the role |
| a node is lost, also before training | the job goes back into the queue | PENDING |
| the controller is silent when the job begins | asked three times, then the same | PENDING |
| something that the user must fix | one line; links of the chain that still wait are cancelled | FAILED, exit code 2 |
| TERM, and the job is no longer RUNNING: scancel | all steps are ended | CANCELLED |
| TERM, and it is: a preemption with a GraceTime | as with USR1, if the trainer ends before that time | PENDING |
"""

import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import SilentNodeError, SlurmBackend, drop_slurm_variables
from arpo_megatron.cluster.preflight import examine_nodes
from arpo_megatron.cluster.profile import ClusterProfile, load_profile
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.cluster.submissions import waiting_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import sft_phase, train_phases, watching
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.plan.node_layout import lay_out_nodes
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import ManagedProcesses, ProcessDiedError
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals
from tools_sandbox.config import TOKEN_VARIABLE

_T = TypeVar("_T")
UNFINISHED = 75
"""Exit code (EX_TEMPFAIL) of a job whose time was up, and that nobody goes on with."""
TERMINATED = 128 + signal.SIGTERM
_IS_BACK = "Job is pending execution"
"""What Slurm says where it has taken the job back by itself already, for a lost node."""
_END_S = 60.0
_LEAVE_S = 20.0
"""Seconds before Slurm's KILL that ending the steps and asking for a requeue take, at most half of what is left."""
_REPEATED_S, _LOOK_S = 120.0, 2.0
"""How long kills of the last life are waited for at most (Slurm repeats them every 60 s), and between two looks."""
_TRIES, _PAUSE_S = 3, 5.0
"""How often a controller that does not answer is asked, and seconds between."""


def supervise(path: Path, warned: Sequence[int]) -> int:
    """Run the job to one of its ends; returns its exit code.

    Args:
        path: of the run directory.
        warned: the signals of Slurm (USR1, TERM) that have come already.
    """
    try:
        return _supervise(RunDirectory(path), warned)
    except UserError as error:
        return _told(error, USER_ERROR_EXIT_CODE)


def _supervise(run: RunDirectory, warned: Sequence[int]) -> int:
    """As `supervise`. Raises UserError for what the user can fix."""
    try:
        job_id, node_list = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
    except KeyError:
        raise UserError("this is no Slurm job: arpo submit starts one") from None
    drop_slurm_variables()
    try:
        return _to_its_end(run, job_id, node_list, warned)
    except UserError:
        # The next link would only find the same, and a run with a link in the queue cannot be resumed.
        if cancelled := _cancel_waiting(run):
            _told(StoppedError(f"cancelled job {', '.join(cancelled)}, the rest of the chain"), 0)
        raise


def _to_its_end(run: RunDirectory, job_id: str, node_list: str, warned: Sequence[int]) -> int:
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    nodes: list[Node] = _patiently(lambda: slurm.allocated_nodes(node_list), [])
    if not nodes:  # nothing that the user could fix, and the next link may be luckier
        return _requeue(job_id, UNFINISHED) if profile.requeue else UNFINISHED
    backend = SlurmBackend(profile, lay_out_nodes(config, profile.gpus_per_node, len(nodes)), nodes, run, job_id)
    try:
        interrupt_on_signals()
        _run(config, run, backend, warned)
    except StoppedError:
        return _leave_to_others(run, profile, job_id)
    except ProcessDiedError as error:
        code = _told(error, error.code)
        return _leave_lost(lost, backend, code) if (lost := backend.lost_nodes()) else code
    except SilentNodeError as error:
        if not (lost := backend.lost_nodes()):
            raise
        _told(error, 0)
        return _leave_lost(lost, backend, UNFINISHED)
    except Interrupted:
        return _requeue(job_id, TERMINATED) if profile.requeue and _still_wanted(job_id) else TERMINATED
    _cancel_waiting(run)
    return 0


def _leave_lost(lost: Sequence[str], backend: SlurmBackend, otherwise: int) -> int:
    """Back into the queue without these nodes, which Slurm itself would miss minutes later."""
    _told(UserError(f"{', '.join(lost)} cannot be reached any more"), 1)
    return _requeue(backend.job_id, otherwise) if backend.profile.requeue else otherwise


def _cancel_waiting(run: RunDirectory) -> list[str]:
    """Of the links of the chain that have not begun; returns their ids. Where Slurm is silent, they find out."""
    cancelled: list[str] = []
    try:
        for waiting in waiting_jobs(run):
            slurm.call("scancel", waiting, check=False)
            cancelled.append(waiting)
    except UserError as error:
        _told(error, 0)
    return cancelled


def _run(config: JobConfig, run: RunDirectory, backend: SlurmBackend, warned: Sequence[int]) -> None:
    _take_secrets(backend.profile)
    with run.locked(), watching(run) as (progress, poll), backend.prepared(), ManagedProcesses(run.logs) as processes:
        run.remove_partial()  # what a kill -9 left
        asked = _Asked(run, backend, progress)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, asked.hear)
        for early in warned:
            asked.hear(early)
        processes.checks.append(asked.heed)
        progress.note(f"job {backend.job_id} on {', '.join(node.name for node in backend.nodes)}")
        for line in backend.layout.describe():
            progress.note(line)
        try:
            _outlast_kills(backend, processes, progress)
            _phases(config, run, backend, processes, progress, poll)
        except (ProcessDiedError, SilentNodeError) as error:
            if not asked.term:
                raise
            _told(error, 0)  # proctrack/linuxproc signals their sruns too: nobody is left to save
            raise Interrupted from None


def _phases(
    config: JobConfig,
    run: RunDirectory,
    backend: SlurmBackend,
    processes: ManagedProcesses,
    progress: Progress,
    poll: Callable[[], None],
) -> None:
    progress.phase("doctor")
    (meeting,) = free_ports(1, backend.nodes[0].address, backend.profile.ports)
    examine_nodes(backend, processes, meeting, poll)
    progress.phase("prepare")
    words = backend.python([sys.executable, "-m", "arpo_megatron.cluster.prepare", str(run.path)])
    processes.wait(processes.start("prepare", backend.step("prepare", backend.nodes[:1], 1, words)), poll=poll)
    if config.sft_only:
        sft_phase(config, run, processes, progress, poll, backend)
    else:
        train_phases(config, run, processes, progress, poll, backend)
    progress.note(f"exported to {run.sft_model if config.sft_only else run.export}")


def _outlast_kills(backend: SlurmBackend, processes: ManagedProcesses, progress: Progress) -> None:
    """After a requeue: start no step before what Slurm repeats for the last life's has reached the nodes.

    The kill of a step that a lost node did not answer is repeated until it does, even when the node is back and the job
    requeued. Slurm numbers steps anew then, so it would end the one that has the number now (seen with Slurm 22.05).
    """
    with suppress(UserError):  # Slurm is silent: most likely there is nothing to wait for
        state = slurm.job_state(backend.job_id)
        if state is None or not state.restarts:
            return
        deadline, mine = time.monotonic() + _REPEATED_S, {node.name for node in backend.nodes}
        told = False
        while (owed := mine & slurm.nodes_owed_a_kill()) and time.monotonic() < deadline:
            if not told:
                progress.note(
                    f"Slurm still repeats on {', '.join(sorted(owed))} the end of an earlier step: waiting for it"
                )
            told = True
            processes.check()
            time.sleep(_LOOK_S)


@dataclass(slots=True)
class _Asked:
    """What Slurm's signals ask for. A handler only notes it: whatever is told or asked of Slurm, the main loop does."""

    run: RunDirectory
    backend: SlurmBackend
    progress: Progress
    heard: list[int] = field(default_factory=list)
    term: bool = False
    deadline: float = math.inf

    def hear(self, number: int, _frame: object = None) -> None:
        """The handler."""
        self.heard.append(number)
        if number == signal.SIGUSR1:
            self.run.stop.touch()
        else:
            self.term = True

    def heed(self) -> None:
        """Do what was asked since the last call.

        Raises:
            Interrupted: the job is no longer wanted, or what it has left is too short for more than its end.
        """
        while self.heard:
            if self.heard.pop(0) == signal.SIGUSR1:
                self._save("Slurm's warning")
            else:
                self._heed_term()
        if time.monotonic() > self.deadline:
            raise Interrupted

    def _heed_term(self) -> None:
        left_s: float = self.backend.profile.signal_s
        with suppress(UserError):  # a controller that is silent now did send it a moment ago: it wants the nodes
            state = slurm.job_state(self.backend.job_id)
            if not _running(state):
                raise Interrupted
            if state is not None and state.end is not None:
                left_s = max(0.0, state.end - time.time())
        self.deadline = min(self.deadline, time.monotonic() + left_s - min(_LEAVE_S, left_s / 2))
        self._save(f"Slurm's TERM, {left_s:.0f} s before the end")

    def _save(self, why: str) -> None:
        self.run.stop.touch()
        self.progress.note(f"{why}: the trainer saves and ends")


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
    waiting: list[str] = _patiently(lambda: waiting_jobs(run), [])
    if waiting:
        return _told(StoppedError(f"saved; job {waiting[0]} goes on"), 0)
    if profile.requeue:
        return _requeue(job_id, UNFINISHED)
    return _told(StoppedError("saved; `arpo resume` goes on"), UNFINISHED)


def _still_wanted(job_id: str) -> bool:
    """A job that was cancelled or whose time is up is no longer RUNNING; one that is to be preempted is."""
    return _patiently(lambda: _running(slurm.job_state(job_id)), True)


def _running(state: slurm.JobState | None) -> bool:
    return state is not None and state.state in ("RUNNING", "SIGNALING")


def _patiently(ask: Callable[[], _T], otherwise: _T) -> _T:
    """What Slurm answers, which may need a moment; `otherwise`, where it remains silent."""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S)
        try:
            return ask()
        except UserError as error:
            _told(error, 0)
    return otherwise


def _requeue(job_id: str, otherwise: int) -> int:
    """Slurm ends this process and starts the job again later, from its newest whole checkpoint.

    Returns `otherwise`, the exit code of a job that Slurm will not take back.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _told(StoppedError("back into the queue"), 0)
    try:
        slurm.call("scontrol", "requeue", job_id)
    except UserError as error:
        if _IS_BACK not in str(error):
            return _told(UserError(f"{error}; `arpo resume` goes on"), otherwise)
    time.sleep(_END_S)
    return otherwise
