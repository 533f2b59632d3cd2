"""Runs the pieces of a study, several at a time, and goes on where an earlier process was stopped."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arpo_megatron.monitor.events import EventReader
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.studies.pieces import ArmRun, Piece
from arpo_megatron.utils.processes import ManagedProcess, ManagedProcesses, ProcessDiedError

_LOOK_EVERY_S = 0.2


@dataclass(slots=True)
class _Running:
    piece: Piece
    role: ManagedProcess
    events: EventReader
    started: float
    doing: str = "starts"

    def look(self) -> None:
        """Keep what the piece's newest events say."""
        for event in self.events.new():
            match event["kind"]:
                case "step":
                    self.doing = f"step {event['step']}/{event['steps']}"
                case "sft":
                    self.doing = f"update {event['update']}/{event['updates']}"


@dataclass(slots=True)
class Study:
    """The pieces of a study under way.

    Attributes:
        runs: all of them, in the order of their start.
        out: directory of the study.
        jobs: pieces at a time.
        progress: the display.
        failed: pieces that did not end well, each with what its log says.
    """

    runs: Sequence[ArmRun]
    out: Path
    jobs: int
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Run what is not done yet. A piece that fails costs its own result, and that of runs that begin with it.

        All others are done when this returns; `check` then tells which have failed.
        """
        waiting = self._missing()
        total = len(waiting)
        self.progress.note(f"{len(self.runs)} runs in {self.out}: {total} pieces to do, {self.jobs} at a time")
        running: list[_Running] = []
        with ManagedProcesses(self.out / "logs") as processes:
            while waiting or running:
                while len(running) < self.jobs and (piece := self._next(waiting)) is not None:
                    waiting.remove(piece)
                    running.append(self._start(piece, processes))
                time.sleep(_LOOK_EVERY_S)
                for each in [each for each in running if self._ended(each, processes)]:
                    running.remove(each)
                waiting = [piece for piece in waiting if piece.needs is None or piece.needs.name not in self.failed]
                done = total - len(waiting) - len(running)
                doing = "; ".join(f"{each.piece.name} {each.doing}" for each in running)
                self.progress.event({"kind": "progress", "text": f"{done} of {total} pieces; {doing}"})

    def check(self) -> None:
        """Raises ProcessDiedError where pieces have failed: it names them and says what their logs end with."""
        if self.failed:
            reports = "\n".join(f"{name}: {report}" for name, report in self.failed.items())
            raise ProcessDiedError(
                f"{len(self.failed)} of the runs failed; the same command tries them again\n{reports}"
            )

    def _missing(self) -> list[Piece]:
        """Pieces to do: each cold start right before the first run that wants it."""
        found: list[Piece] = []
        for run in self.runs:
            for piece in (run.piece.needs, run.piece):
                if piece is not None and not run.piece.done and not piece.done and piece not in found:
                    found.append(piece)
        return found

    def _next(self, waiting: Sequence[Piece]) -> Piece | None:
        return next((piece for piece in waiting if piece.needs is None or piece.needs.done), None)

    def _start(self, piece: Piece, processes: ManagedProcesses) -> _Running:
        piece.run.path.parent.mkdir(parents=True, exist_ok=True)
        role = processes.start(piece.name.replace(" ", "-"), piece.command)
        self.progress.note(f"{piece.name} {'goes on' if piece.begun else 'begins'}")
        return _Running(piece, role, EventReader(piece.run.events), time.monotonic())

    def _ended(self, each: _Running, processes: ManagedProcesses) -> bool:
        """Whether a piece has ended; how, is told."""
        each.look()
        code = each.role.process.poll()
        if code is None:
            return False
        processes.running.remove(each.role)
        name, seconds = each.piece.name, time.monotonic() - each.started
        if code == 0:
            self.progress.note(f"{name} is done after {seconds:.0f} s{_outcome(each.piece)}")
        else:
            self.failed[name] = each.role.failure()
            self.progress.note(f"{name} failed after {seconds:.0f} s; log: {each.role.log}")
        return True


def _outcome(piece: Piece) -> str:
    if piece.verb == "sft":
        return ""
    success = json.loads(piece.run.result.read_text())["success"]
    return f": held-out success {success['before']:.1%} -> {success['after']:.1%}"
