"""The supervisor of a Slurm job, its first process (`python -m arpo_megatron.cluster RUN_DIR`).

Preflight checks, preparation, cold start and training are steps of the allocation (`backend.py`), managed as on one
machine: services are restarted within limits, and the first fatal exit ends the job. How a job ends:

| event | action | state of the job |
| --- | --- | --- |
| training is done | the waiting jobs of the chain are cancelled | COMPLETED |
| USR1: a time limit or preemption is near | the trainer saves and ends; the chain's next job continues | COMPLETED |
| USR1, and no job of the chain waits | the job is requeued | PENDING |
| USR1, and no step was gained since the last requeue | one line; `arpo resume` continues | FAILED, exit code 75 |
| USR1, and Slurm or the profile refuses a requeue | one line; `arpo resume` continues | FAILED, exit code 75 |
| a fatal exit, with `restarts` left | the job is requeued without the guilty node (`restarts.py`) | PENDING |
| a node fails a check that others pass, with `restarts` left | the job is requeued without it | PENDING |
| a fatal exit | all steps end; last lines of the failed process's log; the next job continues | FAILED, its exit code |
| a node is lost, even before training | the job is requeued without it (`restarts.py`) | PENDING |
| the controller does not answer at the start | it is asked three times, then the job is requeued | PENDING |
| an error that the user must fix | one line; the waiting jobs of the chain are cancelled | FAILED, exit code 2 |
| TERM, and the job is no longer RUNNING: scancel | all steps are ended | CANCELLED |
| TERM, and it is RUNNING: preemption with a GraceTime | like USR1, if the trainer ends in time | PENDING |
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import NodeError, SlurmBackend, drop_slurm_variables
from arpo_megatron.cluster.preflight import examine_nodes
from arpo_megatron.cluster.profile import ClusterProfile, load_profile
from arpo_megatron.cluster.restarts import after_failure, exclude_nodes, saved_state, start_cycles
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.cluster.submissions import waiting_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import TRAINING, RunDirectory
from arpo_megatron.launch.job import hold_run, run_sft_phase, run_training_phases
from arpo_megatron.launch.services import Job
from arpo_megatron.launch.webhook import news_of
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.plan.node_layout import lay_out_nodes
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals

_T = TypeVar("_T")
UNFINISHED = 75
"""Exit code (EX_TEMPFAIL) of a job that reached its time limit and that no other job continues."""
TERMINATED = 128 + signal.SIGTERM
_REQUEUED_ALREADY = "Job is pending execution"
"""Slurm's answer if it has already requeued the job itself, for a lost node."""
_END_S = 60.0
_LEAVE_S = 20.0
"""Seconds reserved for ending the steps and requesting a requeue before Slurm's KILL; at most half of the time left."""
_REPEATED_S, _REPEATED_INTERVAL_S = 120.0, 2.0
"""How long to wait for kills of the job's previous run (Slurm repeats them every 60 s), and the interval of checks."""
_TRIES, _PAUSE_S = 3, 5.0
"""Number of attempts with a controller that does not answer, and seconds between them."""


def supervise(path: Path, warned: Sequence[int], *, only_sft: bool = False) -> int:
    """Run the job to its end and return its exit code.

    Args:
        path: run directory.
        warned: signals from Slurm (USR1, TERM) that were received during the import.
        only_sft: end after the cold start.
    """
    try:
        return _supervise(RunDirectory(path), warned, only_sft)
    except UserError as error:
        return report(error, USER_ERROR_EXIT_CODE)


def _supervise(run: RunDirectory, warned: Sequence[int], only_sft: bool) -> int:
    try:
        job_id, node_list = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
    except KeyError:
        raise UserError("this is not a Slurm job: start one with arpo submit") from None
    drop_slurm_variables()
    try:
        return _run_to_end(run, job_id, node_list, warned, only_sft)
    except UserError:
        # The next job of the chain would fail in the same way, and a run with a job in the queue cannot be resumed.
        if cancelled := _cancel_waiting(run):
            report(StoppedError(f"cancelled the rest of the chain: job {', '.join(cancelled)}"), 0)
        raise


def _run_to_end(run: RunDirectory, job_id: str, node_list: str, warned: Sequence[int], only_sft: bool) -> int:
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    nodes: list[Node] = retry(lambda: slurm.allocated_nodes(node_list), [])
    if not nodes:  # the user cannot fix it, and a later job may succeed
        return _requeue(job_id, UNFINISHED) if profile.requeue else UNFINISHED
    backend = SlurmBackend(profile, lay_out_nodes(config, profile.gpus_per_node, len(nodes)), nodes, run, job_id)
    saved = saved_state(run)
    try:
        interrupt_on_signals()
        _run(config, run, backend, warned, only_sft)
    except StoppedError:
        return _hand_over(saved, run, profile, job_id)
    except ProcessDiedError as error:
        return _after_death(error, run, backend)
    except NodeError as error:
        return _after_node_error(error, run, backend)
    except Interrupted:
        return _requeue(job_id, TERMINATED) if profile.requeue and _still_wanted(job_id) else TERMINATED
    _cancel_waiting(run)
    return 0


def _after_death(error: ProcessDiedError, run: RunDirectory, backend: SlurmBackend) -> int:
    code = report(error, error.code)
    if lost := backend.lost_nodes():
        return _leave_lost(lost, run, backend, code)
    return _restart(str(error), run, backend, code) if backend.profile.restarts else code


def _after_node_error(error: NodeError, run: RunDirectory, backend: SlurmBackend) -> int:
    """Leave out nodes that are lost or guilty. Raises the error if the user must fix it."""
    lost = backend.lost_nodes()
    if not lost and not (error.guilty and backend.profile.restarts):
        raise error
    report(error, 0)
    if lost:
        return _leave_lost(lost, run, backend, UNFINISHED)
    return _restart(str(error), run, backend, USER_ERROR_EXIT_CODE, error.guilty)


def _leave_lost(lost: Sequence[str], run: RunDirectory, backend: SlurmBackend, otherwise: int) -> int:
    """Requeue the job without these nodes, which Slurm itself would notice minutes later."""
    text = f"cannot reach {', '.join(lost)} any more"
    report(UserError(text), 1)
    return _restart(text, run, backend, otherwise, lost) if backend.profile.requeue else otherwise


def _restart(failure: str, run: RunDirectory, backend: SlurmBackend, code: int, guilty: Sequence[str] = ()) -> int:
    """Leave the rest to this job after a requeue, or to the next one of the chain, if a restart may help.

    Args:
        failure: message of the failure.
        run: the run.
        backend: profile and nodes of the job.
        code: exit code of the job if it is not requeued.
        guilty: nodes that are known to be guilty: the job itself is requeued without them, also in a chain.
    """
    after, text = after_failure(failure, run, backend, guilty)
    report(StoppedError(text), 0)
    if after is None:
        _cancel_waiting(run)
        return code
    after.write(run)
    waiting: list[str] = retry(lambda: waiting_jobs(run), [])
    for job in waiting:
        _exclude(job, after.excluded)
    return code if waiting and not guilty else _requeue(backend.job_id, code, after.excluded)


def _exclude(job_id: str, nodes: Sequence[str]) -> None:
    retry(lambda: exclude_nodes(job_id, nodes), None)


def _cancel_waiting(run: RunDirectory) -> list[str]:
    """Cancel the jobs of the chain that have not started, and return their ids. If Slurm is silent, they fail later."""
    cancelled: list[str] = []
    try:
        for waiting in waiting_jobs(run):
            slurm.call("scancel", waiting, check=False)
            cancelled.append(waiting)
    except UserError as error:
        report(error, 0)
    return cancelled


def _run(config: JobConfig, run: RunDirectory, backend: SlurmBackend, warned: Sequence[int], only_sft: bool) -> None:
    read_secrets(backend.profile)
    with backend.prepared(), hold_run(config, run, backend, use=TRAINING) as job, news_of(job):
        progress = job.progress
        signals = _Signals(run, backend, progress)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signals.receive)
        for early in warned:
            signals.receive(early)
        job.supervisor.checks.append(signals.handle)
        progress.note(f"job {backend.job_id} on {', '.join(node.name for node in backend.nodes)}")
        for line in backend.layout.describe():
            progress.note(line)
        try:
            _wait_for_old_kills(job, backend)
            _phases(job, backend, only_sft or config.sft_only)
        except (ProcessDiedError, NodeError) as error:
            if not signals.term:
                raise
            report(error, 0)  # proctrack/linuxproc sends TERM to the steps' sruns too, so none could save
            raise Interrupted from None


def _phases(job: Job, backend: SlurmBackend, only_sft: bool) -> None:
    job.progress.phase("doctor")
    (port,) = free_ports(1, backend.nodes[0].address, backend.profile.ports)
    examine_nodes(backend, job.supervisor, port, job.show_events)
    job.progress.phase("prepare")
    command = backend.python([sys.executable, "-m", "arpo_megatron.cluster.prepare", str(job.run.path)])
    step = backend.step("prepare", backend.nodes[:1], 1, command)
    job.supervisor.wait(job.supervisor.start("prepare", step), poll=job.show_events)
    if only_sft:
        run_sft_phase(job)
    else:
        run_training_phases(job)
    job.progress.note(f"exported to {job.run.sft_model if only_sft else job.run.export}")
    job.progress.next_command("arpo", "view", job.run.path)


def _wait_for_old_kills(job: Job, backend: SlurmBackend) -> None:
    """After a requeue, wait until Slurm has delivered the kills of the job's previous run.

    Slurm repeats the kill of a step until its node answers, even if the node was lost and the job requeued. Step
    numbers start at 0 again, so that kill would end a new step (seen with Slurm 22.05).
    """
    with suppress(UserError):  # Slurm does not answer: most likely there is nothing to wait for
        state = slurm.job_state(backend.job_id)
        if state is None or not state.restarts:
            return
        deadline, names = time.monotonic() + _REPEATED_S, {node.name for node in backend.nodes}
        reported = False
        while (pending := names & slurm.nodes_with_pending_kills()) and time.monotonic() < deadline:
            if not reported:
                job.progress.note(f"waiting until Slurm has ended earlier steps on {', '.join(sorted(pending))}")
            reported = True
            job.supervisor.check()
            time.sleep(_REPEATED_INTERVAL_S)


@dataclass(slots=True)
class _Signals:
    """Slurm's signals. The handler only records them; the main loop prints and calls Slurm."""

    run: RunDirectory
    backend: SlurmBackend
    progress: Progress
    received: list[int] = field(default_factory=list)
    term: bool = False
    deadline: float = math.inf

    def receive(self, number: int, _frame: object = None) -> None:
        """Record a signal; this is the handler."""
        self.received.append(number)
        if number == signal.SIGUSR1:
            self.run.stop.touch()
        else:
            self.term = True

    def handle(self) -> None:
        """React to the signals since the last call.

        Raises:
            Interrupted: the job was cancelled, or the time left is only enough to end it.
        """
        while self.received:
            if self.received.pop(0) == signal.SIGUSR1:
                self._save("Slurm's warning")
            else:
                self._handle_term()
        if time.monotonic() > self.deadline:
            raise Interrupted

    def _handle_term(self) -> None:
        left_s: float = self.backend.profile.signal_s
        with suppress(UserError):  # no answer now, but the controller did send TERM, so it wants the nodes back
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


def read_secrets(profile: ClusterProfile) -> None:
    """Put the secrets into the environment, which srun passes to every step. They are not written to disk."""
    for name, source in profile.secrets.items():
        if source != "env":
            try:
                os.environ[name] = Path(source).expanduser().read_text(encoding="utf-8").strip()
            except OSError as error:
                raise UserError(f"cannot read the secret {name} from {source}: {error.strerror}") from None
        elif not os.environ.get(name):
            raise UserError(f"the secret {name} is not in the environment that sbatch passed on")


def report(error: Exception, code: int) -> int:
    """Print an error and return `code`."""
    print(f"arpo: {error}", file=sys.stderr, flush=True)
    return code


def _hand_over(saved: tuple[int, int, int], run: RunDirectory, profile: ClusterProfile, job_id: str) -> int:
    """Leave the rest to the next job of the chain, or to this job after a requeue, unless that gains nothing.

    `saved` is the `saved_state` at the start.
    """
    if start_cycles(saved, run, profile, job_id):
        _cancel_waiting(run)
        text = "time is up, and no step was gained since the last requeue: set a longer `time` or a shorter `signal_s`"
        return report(UserError(f"{text} in the profile, and `arpo resume --cluster`"), UNFINISHED)
    waiting: list[str] = retry(lambda: waiting_jobs(run), [])
    if waiting:
        return report(StoppedError(f"saved; job {waiting[0]} continues the run"), 0)
    if profile.requeue:
        return _requeue(job_id, UNFINISHED)
    return report(StoppedError("saved; `arpo resume` continues the run"), UNFINISHED)


def _still_wanted(job_id: str) -> bool:
    """Return whether the job is still RUNNING, as before a preemption. It is not after scancel or the time limit."""
    return retry(lambda: _running(slurm.job_state(job_id)), True)


def _running(state: slurm.JobState | None) -> bool:
    return state is not None and state.state in ("RUNNING", "SIGNALING")


def retry(ask: Callable[[], _T], otherwise: _T) -> _T:
    """Ask Slurm, several times if it does not answer, and return `otherwise` if it stays silent."""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S)
        try:
            return ask()
        except UserError as error:
            report(error, 0)
    return otherwise


def _requeue(job_id: str, otherwise: int, excluded: Sequence[str] = ()) -> int:
    """Ask Slurm to end this process and start the job again later; the run then continues from its newest checkpoint.

    Args:
        job_id: this job.
        otherwise: exit code of the job, which is returned if Slurm refuses.
        excluded: nodes on which it must not start again.
    """
    # Only a waiting job can exclude nodes, so this process does it after the requeue, and must outlive Slurm's TERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report(StoppedError("requeueing the job"), 0)
    try:
        slurm.call("scontrol", "requeue", job_id)
    except UserError as error:
        if _REQUEUED_ALREADY not in str(error):
            return report(UserError(f"{error}; `arpo resume` continues the run"), otherwise)
    if excluded:
        _exclude(job_id, excluded)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_END_S)
    return otherwise
