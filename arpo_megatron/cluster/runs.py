"""Commands for submitted runs: find one by name, and print its status, logs and health, or cancel it."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.profile import load_profile, profile_names
from arpo_megatron.cluster.ssh import cluster_hint, login_node
from arpo_megatron.cluster.submissions import command_jobs, job_states, job_states_of, live_jobs, submissions_of
from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.checkpoint_dirs import checkpoint_directories
from arpo_megatron.jobs.run_directory import RUNS, RunDirectory, run_path
from arpo_megatron.launch import health
from arpo_megatron.utils.json_lines import json_lines
from arpo_megatron.utils.regular_files import read_regular

_FOLLOW_INTERVAL_S = 1.0
_STATE_INTERVAL_S = 3.0
_SILENCE_S = 600.0
"""How long `arpo logs --follow` waits for a controller that does not answer; longer than its restart takes."""
_ENDING_S, _ENDING_INTERVAL_S = 60.0, 1.0
"""How long to wait for a job that is ending (Slurm's KillWait is 30 s by default), and the interval of the checks."""


def find_run(name: str, cluster: str | None = None) -> RunDirectory:
    """Find a submitted run by its directory, or by its name in the `runs` of the profiles.

    Raises:
        UserError: there is no such run, or several have that name.
    """
    if (run := RunDirectory(Path(name).absolute())).submissions.is_dir():
        if not submissions_of(run):
            raise UserError(f"{name}: no job of this run was submitted")
        return run
    found = [run for run in _submitted(cluster) if run.path.name == name]
    if not found and not cluster and RunDirectory(local_path := run_path(name)).config.is_file():
        raise UserError(
            f"{local_path} was not submitted to a cluster: `arpo train RECIPE --resume` continues it, and ctrl-C there "
            "stops it"
        )
    if not found:
        submitted = [run.path.name for run in _submitted(cluster)]
        local = [] if cluster else [path.parent.name for path in RUNS.glob("*/config.yaml")]
        places = f"of the submitted ones ({', '.join(sorted(submitted)) or 'none'})"
        places = places if cluster else f"in {RUNS.absolute()} or {places}"
        raise UserError(
            f"no run {places} is called {name}{did_you_mean(name, [*submitted, *local]) or '.'} Give its directory, or "
            "the --cluster that it was submitted to"
        )
    if len(found) > 1:
        raise UserError(
            f"several runs are called {name}: give the directory, {' or '.join(str(r.path) for r in found)}"
        )
    return found[0]


def address_words(run: RunDirectory) -> list[str]:
    """Return the words that identify a run in a command: its name if that is enough, else its directory.

    The name is not enough if the run's profile is not in `slurm/clusters`, or if another run has the same name.
    """
    return [run.path.name if _found_by_name(run) else str(run.path), *shlex.split(cluster_hint())]


def address(run: RunDirectory) -> str:
    """Return `address_words` for a command in a text."""
    return shlex.join(address_words(run))


def _found_by_name(run: RunDirectory) -> bool:
    with suppress(UserError, OSError):
        if cluster_hint():  # the printed command names the profile
            return load_profile(str(run.cluster)).runs.expanduser().absolute() == run.path.parent
        return find_run(run.path.name).path == run.path
    return False


def _submitted(cluster: str | None) -> list[RunDirectory]:
    places = set()
    for name in [cluster] if cluster else profile_names():
        try:
            if not cluster and login_node(name) is not None:  # only queried if the user names it
                continue
            places.add(load_profile(name).runs.expanduser().absolute())
        except UserError:
            if cluster:  # else it is a profile of another cluster, with variables that are not set here
                raise
    folders = (path.parents[1] for place in sorted(places) for path in place.glob("*/submissions/1.json"))
    return [RunDirectory(path) for path in sorted(folders, key=lambda path: path.stat().st_mtime)]


def print_status(name: str | None, cluster: str | None) -> list[RunDirectory]:
    """Print one line per submitted run, or all details of the run `name`; return the runs."""
    runs = [find_run(name, cluster)] if name else _submitted(cluster)
    for run, states in zip(runs, job_states_of(runs), strict=True):
        state = _newest(states)
        line = f"{run.path.name}: " + ("not in Slurm any more" if state is None else f"job {state.id} {state.state}")
        try:
            progress = _progress(run)
        except UserError as error:  # such as a key of another version: one run must not hide the others
            if name:
                raise
            progress = str(error)
        print(f"{line}, {progress}")
        if name:
            _print_details(run, None if state is None else slurm.job_state(state.id))
    return runs


def newest_state(run: RunDirectory) -> slurm.JobState | None:
    """Return the state of the run's running job, else of the first waiting one, else of the last one that ran."""
    state = _newest(job_states(run))
    return None if state is None else slurm.job_state(state.id)


def _newest(states: Sequence[slurm.JobState]) -> slurm.JobState | None:
    live = [state for state in states if state.live]
    running = [state for state in live if state.state != "PENDING"]
    return next(iter(running or live or states[::-1]), None)


def nodes_of(run: RunDirectory) -> int:
    """Return the number of nodes of the newest submission."""
    return int(submissions_of(run)[-1]["layout"]["nodes"])


def _progress(run: RunDirectory) -> str:
    """Describe the progress of the cold start until it is done, then of the ARPO loop."""
    config = resolve.read(run.config)
    updates, steps = config.sft.steps, config.train.steps
    if (done := run.steps_done) >= steps:
        return f"training is done ({done} steps)"
    if own := checkpoint_directories(run.checkpoints):
        return f"newest checkpoint {own[-1].name} of {steps}"
    if updates and not run.sft_done:
        then = "" if config.sft_only else f"; then {steps} steps"
        if checkpoints := checkpoint_directories(run.sft_checkpoints):
            return f"cold start: newest checkpoint {checkpoints[-1].name} of {updates}{then}"
        return f"cold start: no checkpoint yet, {updates} updates wanted{then}"
    if config.sft_only:
        return "training is done"
    return ("the cold start is done, " if updates else "") + f"no checkpoint yet, {steps} steps wanted"


def _print_details(run: RunDirectory, state: slurm.JobState | None) -> None:
    if state is not None:
        print(f"  nodes {state.nodes or '-'}, {state.elapsed}, restarts {state.restarts}, exit {state.exit_code}")
        if state.state == "PENDING":
            print(f"  waiting: {state.reason}")
    submission = submissions_of(run)[-1]
    changed = " with uncommitted changes (submissions/*.diff)" if submission["changed"] else ""
    jobs = ", ".join(job for each in submissions_of(run) for job in each["jobs"])
    print(f"  jobs {jobs}; code {submission['commit'][:12]}{changed}")
    for command, job in command_jobs(run):
        print(f"  job {job.id} {job.state}: {command}")
    print(f"  {run.path}")
    for event in _last_events(run, 3):
        print(f"  {time.strftime('%H:%M:%S', time.localtime(event['time']))} {event['text']}")


def _last_events(run: RunDirectory, count: int) -> list[dict[str, Any]]:
    lines = list(json_lines(read_regular(run.events)))[-500:] if run.events.is_file() else []
    events = [event for _, event in lines if event is not None]
    return [event for event in events if event.get("kind") in ("note", "restart", "user_error")][-count:]


def log_of(run: RunDirectory, service: str) -> Path:
    """Return the log of a process. `job` is the supervisor, with one log per job and restart: the newest is returned.

    Raises:
        UserError: there is no such log; the message lists the existing ones.
    """
    if not (found := _logs_of(run, service)):
        known: Iterable[str] = sorted(path.stem for path in run.logs.glob("*.log"))
        raise UserError(f"{run.path.name} has no log of {service!r} yet; it has: {', '.join(['job', *known])}")
    return found[-1]


def _logs_of(run: RunDirectory, service: str) -> list[Path]:
    """Return the logs of a process, oldest first."""
    found = [*run.logs.glob("log-*.out" if service == "job" else "*.log"), *run.logs.glob("*/log-*.out")]
    # Not in the glob: a name is not a pattern. A job of its own has a folder with the name of its command.
    wanted = [path for path in found if service == _service_of(run, path)]
    return sorted(wanted, key=lambda path: path.stat().st_mtime)


def _service_of(run: RunDirectory, log: Path) -> str:
    if log.parent != run.logs:
        return log.parent.name
    return "job" if log.suffix == ".out" else log.stem


@dataclass(slots=True)
class _EndOfJobs:
    """Detects the end of a run's jobs for `arpo logs --follow`."""

    run: RunDirectory
    silent_since: float | None = None

    def reached(self) -> bool:
        """Return whether no job waits or runs. Report a silent Slurm once; raise UserError if it stays silent."""
        try:
            state = newest_state(self.run)
        except UserError as error:
            if self.silent_since is None:
                self.silent_since = time.monotonic()
                print(f"arpo: {error}; trying again", file=sys.stderr, flush=True)
            elif time.monotonic() - self.silent_since > _SILENCE_S:
                raise
            return False
        self.silent_since = None
        return state is None or not state.live


def print_log(
    run: RunDirectory, service: str, *, lines: int, follow: bool, ended: Callable[[], bool] | None = None
) -> None:
    """Print the last lines of a log. With `follow`, wait for the log, and print new text until the end of the job.

    Args:
        run: the run.
        service: its name, or `job`.
        lines: number of last lines to print first.
        follow: print what the process writes from now on, too.
        ended: whether the job has ended; None asks Slurm.
    """
    ended = ended or _EndOfJobs(run).reached
    while follow and not _logs_of(run, service) and not ended():
        time.sleep(_FOLLOW_INTERVAL_S)
    newest = log_of(run, service)
    content = read_regular(newest)
    if not content:
        print(f"{newest} is empty", file=sys.stderr)
    text = content.decode(errors="replace").splitlines(keepends=True)
    print("".join(text[-lines:] if lines else []), end="", flush=True)
    path, start = newest if follow else None, len(content)
    while path is not None:
        path, start = _follow(run, service, path, start, ended), 0


def _follow(run: RunDirectory, service: str, path: Path, start: int, ended: Callable[[], bool]) -> Path | None:
    """Print a log from byte `start` on. Return the log of the next restart, or None after the end of the job."""
    asked = 0.0
    with path.open("rb") as file:
        file.seek(start)
        while True:
            if path.stat().st_size < file.tell():  # rotated
                file.seek(0)
            new = file.read().decode(errors="replace")
            print(new, end="", flush=True)
            if not new and time.monotonic() - asked > _STATE_INTERVAL_S:
                reached, asked = ended(), time.monotonic()
                logs = _logs_of(run, service)  # a restarted supervisor writes a new one
                later = logs[logs.index(path) + 1 :]
                if later or reached:
                    print(file.read().decode(errors="replace"), end="", flush=True)  # written since the last read
                    return later[0] if later else None
            time.sleep(_FOLLOW_INTERVAL_S)


def print_health(run: RunDirectory) -> None:
    """Print the health of a running job. Raises UserError if the run has none, or it has no services yet."""
    state = newest_state(run)
    if state is None or state.state != "RUNNING":
        raise UserError(f"{run.path.name} has no running job: arpo status {address(run)}")
    health.print_health(run)


def cancel(run: RunDirectory) -> None:
    """Cancel all jobs of a run, the waiting ones first, because one of them could start otherwise."""
    commands = [state.id for _, state in command_jobs(run) if state.live]
    if not (live := [*live_jobs(run), *commands]):
        raise UserError(f"{run.path.name} has no waiting or running job")
    for job in reversed(live):
        slurm.call("scancel", job)
    print(f"{run.path.name}: cancelled job {', '.join(live)}; arpo resume {address(run)} continues the run")


def wait_until_ended(run: RunDirectory) -> None:
    """Wait for a job that is already ending, as after `arpo cancel`.

    Raises:
        UserError: a job of the run waits or runs, or takes too long to end.
    """
    name, began = run.path.name, time.monotonic()
    reported = False
    while live := [state for state in job_states(run) if state.live]:
        if other := [state for state in live if state.state != "COMPLETING"]:
            raise UserError(f"job {other[0].id} of {name} is in the queue: run arpo cancel {address(run)} first")
        if time.monotonic() - began > _ENDING_S:
            raise UserError(f"job {live[0].id} of {name} is still ending after {_ENDING_S:g} s: try again later")
        if not reported:
            print(f"arpo: waiting for job {live[0].id} of {name} to end", file=sys.stderr, flush=True)
        reported = True
        time.sleep(_ENDING_INTERVAL_S)
