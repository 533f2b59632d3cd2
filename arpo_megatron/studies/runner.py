"""Start the runs of a study, several at a time, and resume those that an earlier process left unfinished."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arpo_megatron.launch.supervisor import SupervisedProcess, Supervisor
from arpo_megatron.monitor.events import EventReader
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.studies.runs import StudyRun
from arpo_megatron.utils.processes import ProcessDiedError

_POLL_S = 0.2


@dataclass(slots=True)
class _Active:
    """A run whose process is alive."""

    run: StudyRun
    process: SupervisedProcess
    events: EventReader
    started: float
    status: str = "starts"

    def update_status(self) -> None:
        for event in self.events.new():
            match event["kind"]:
                case "step":
                    self.status = f"step {event['step']}/{event['steps']}"
                case "sft":
                    self.status = f"update {event['update']}/{event['updates']}"


@dataclass(slots=True)
class StudyRunner:
    """Runs the trainings of a study as processes, several at a time."""

    runs: Sequence[StudyRun]
    """Training runs in the order of their start."""
    out: Path
    """Directory of the study."""
    jobs: int
    """Number of runs at a time."""
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)
    """Failure report of each failed run, by name."""

    def run(self) -> None:
        """Execute all unfinished runs.

        A failed run fails the runs that need its export; all others still finish. `check` raises for the failures.
        """
        waiting = self._unfinished()
        total = len(waiting)
        self.progress.note(f"{len(self.runs)} runs in {self.out}: {total} to do, {self.jobs} at a time")
        active: list[_Active] = []
        with Supervisor(self.out / "logs") as supervisor:
            while waiting or active:
                while len(active) < self.jobs and (run := _next_ready(waiting)) is not None:
                    waiting.remove(run)
                    active.append(self._start(run, supervisor))
                time.sleep(_POLL_S)
                for each in [each for each in active if self._ended(each, supervisor)]:
                    active.remove(each)
                waiting = [run for run in waiting if run.sft_run is None or run.sft_run.name not in self.failed]
                done = total - len(waiting) - len(active)
                status = "; ".join(f"{each.run.name} {each.status}" for each in active)
                self.progress.event({"kind": "progress", "text": f"{done} of {total} runs; {status}"})

    def check(self) -> None:
        """Raise ProcessDiedError if a run failed, with the end of each failed run's log."""
        if self.failed:
            reports = "\n".join(f"{name}: {report}" for name, report in self.failed.items())
            raise ProcessDiedError(f"{len(self.failed)} of the runs failed; the same command retries them\n{reports}")

    def _unfinished(self) -> list[StudyRun]:
        """Return the runs to execute, each cold start directly before the first run that needs it."""
        found: list[StudyRun] = []
        for run in self.runs:
            for each in (run.sft_run, run):
                if each is not None and not run.done and not each.done and each not in found:
                    found.append(each)
        return found

    def _start(self, run: StudyRun, supervisor: Supervisor) -> _Active:
        run.directory.path.parent.mkdir(parents=True, exist_ok=True)
        process = supervisor.start(run.name.replace(" ", "-"), run.command)
        self.progress.note(f"{run.name} {'resumes' if run.started else 'starts'}")
        return _Active(run, process, EventReader(run.directory.events), time.monotonic())

    def _ended(self, each: _Active, supervisor: Supervisor) -> bool:
        """Return whether a run has ended, and report how."""
        each.update_status()
        code = each.process.poll()
        if code is None:
            return False
        supervisor.forget(each.process)
        name, seconds = each.run.name, time.monotonic() - each.started
        if code == 0:
            self.progress.note(f"{name} is done after {seconds:.0f} s{_success(each.run)}")
        else:
            self.failed[name] = each.process.failure()
            self.progress.note(f"{name} failed after {seconds:.0f} s; log: {each.process.log}")
        return True


def _next_ready(waiting: Sequence[StudyRun]) -> StudyRun | None:
    return next((run for run in waiting if run.sft_run is None or run.sft_run.done), None)


def _success(run: StudyRun) -> str:
    if run.sft_run is None:
        return ""
    success = run.directory.read_result()["success"]
    return f": held-out success {success['before']:.1%} -> {success['after']:.1%}"
