"""Checkpoints: directories that are whole or absent, written while the training goes on.

A save writes into `step_N.tmp`: every rank its own files, then a manifest with the checksum of each of them; the rename
to `step_N` is what makes it count. Whatever happens before leaves the older checkpoints as they were, and a `.tmp` that
is swept away. Training waits only for the copy of the state to host memory; a thread on every rank writes, over a gloo
group of its own, so a checkpoint counts as soon as the last rank has written, and a failure is known at the next step.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch.distributed as dist

from arpo_megatron.actor import parallel
from arpo_megatron.actor.manifest import (
    DamagedError,
    FileRecord,
    damage,
    read_manifest,
    record,
    write_manifest,
)
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.checkpoint_dirs import checkpoint_directories, kept
from arpo_megatron.utils.atomic import flush, remove, replace_directory

MAX_FAILED_SAVES = 3
"""Saves that may fail in a row (a full disk) before the run stops: until then it goes on without a new checkpoint."""
_STATE_FILE = "state.json"
_ACTOR_DIRECTORY = "actor"
_GROUP = "checkpoint"


class Snapshot(Protocol):
    """A state at one moment, copied and ready to be written."""

    def write(self) -> tuple[Any, list[Path]]:
        """Write this rank's part, in any thread; what `finish` needs of it, and the files."""

    def finish(self, written: list[Any]) -> list[Path]:
        """On the controller, with every rank's `written`: write what joins them; those files."""


class Saveable(Protocol):
    """An actor, as far as its checkpoint goes."""

    def snapshot(self, directory: Path) -> Snapshot:
        """Copy the state for writing into an existing empty directory; all ranks call it."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended.

    Attributes:
        step: of the checkpoint.
        seconds: from the beginning of the save to its end, most of it beside the training.
        error: why there is no such checkpoint; empty where there is.
    """

    step: int
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        if not self.error:
            return f"step_{self.step} is saved ({self.seconds:.1f} s)"
        return f"step_{self.step} could not be saved: {self.error}; older checkpoints are whole, training goes on"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where to go on from.

    Attributes:
        path: the newest whole checkpoint, None where there is none at all.
        refused: newer ones and what is wrong with them.
    """

    path: Path | None
    refused: tuple[tuple[Path, str], ...] = ()

    @property
    def told(self) -> list[str]:
        """A line for each one that is not used."""
        return [f"{path.name} is not used: {why}" for path, why in self.refused]


def find_damage(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a phrase each; all ranks read a share of it and get the same answer."""
    records, unreadable = parallel.broadcast_object(_manifest(path) if parallel.is_rank_zero() else ([], ""))
    if unreadable:
        return [unreadable]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = records[dist.get_rank() if ranks > 1 else 0 :: ranks]
    return [phrase for part in parallel.gather_objects(damage(path, mine)) for phrase in part]


def newest_intact(root: Path) -> ResumePoint:
    """Check the checkpoints at `root` from the newest down to the first that is whole; all ranks call it.

    Raises:
        UserError: there are checkpoints, but none is whole. Beginning anew is not for the program to decide.
    """
    refused: list[tuple[Path, str]] = []
    for path in parallel.broadcast_object(checkpoint_directories(root)[::-1]):
        if not (phrases := find_damage(path)):
            return ResumePoint(path, tuple(refused))
        refused.append((path, phrases[0] + (f" and {len(phrases) - 1} more" if len(phrases) > 1 else "")))
    if refused:
        told = "; ".join(ResumePoint(None, tuple(refused)).told)
        raise UserError(f"no checkpoint in {root} is whole ({told}): restore one, or delete them all")
    return ResumePoint(None)


class CheckpointStore:
    """The checkpoints `root/step_N` of a run, on a file system that all ranks share; they construct and call it alike.

    Args:
        root: made where it is missing; what an interrupted save left there is removed.
        keep: newest checkpoints kept.
        keep_every: those of every n-th step are kept too; 0: none.
    """

    def __init__(self, root: Path, keep: int, keep_every: int = 0) -> None:
        self.root = root
        self._keep = keep
        self._keep_every = keep_every
        self._writing: _Writing | None = None
        self._reports: list[SaveReport] = []
        self._failed_in_a_row = 0
        self._last_error = ""
        if parallel.is_rank_zero():
            root.mkdir(parents=True, exist_ok=True)
            for stale in root.glob("step_*.tmp"):  # a stranger's file of another name does no harm
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        parallel.gather_objects(None, _GROUP)  # makes the group, and is a barrier

    def save(
        self,
        step: int,
        actor: Saveable,
        crash_state: dict[str, Any],
        files: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> None:
        """Begin to write `step_N`; `reports` tells how it ended. Waits for the save before it.

        Args:
            step: N; an older checkpoint of the same step is replaced.
            actor: the training state as it is now.
            crash_state: whatever else must survive a crash, JSON-safe; the controller's is written.
            files: names and contents of more of it; rank 0's are asked for and written by the thread that writes.

        Raises:
            TypeError: `crash_state` is not JSON-safe.
            UserError: the last `MAX_FAILED_SAVES` saves all failed.
        """
        self.finish()
        if self._failed_in_a_row >= MAX_FAILED_SAVES:
            raise UserError(
                f"{self._failed_in_a_row} checkpoints in a row could not be saved ({self._last_error}): "
                f"mend {self.root} and go on with --resume"
            )
        state, started = json.dumps(crash_state), time.monotonic()
        partial = self.root / f"step_{step}.tmp"
        if error := _on_rank_zero(lambda: _fresh(partial), "control"):
            self._note(SaveReport(step, time.monotonic() - started, error))
            return
        self._writing = _Writing(
            step, partial, actor.snapshot(partial / _ACTOR_DIRECTORY), state, files, self._commit, started
        )

    def reports(self) -> list[SaveReport]:
        """How saves ended, those not yet told; does not wait."""
        if self._writing is not None and self._writing.report is not None:
            self._note(self._writing.report)
            self._writing = None
        told, self._reports = self._reports, []
        return told

    def finish(self) -> None:
        """Wait until the save under way has ended."""
        if self._writing is not None:
            self._note(self._writing.wait())
            self._writing = None

    def resume_point(self) -> ResumePoint:
        """`newest_intact`; damaged newer ones are set aside as `step_N.damaged`, so they crowd out nothing.

        Raises:
            UserError: there are checkpoints, but none is whole.
        """
        found = newest_intact(self.root)
        if parallel.is_rank_zero():
            for path, _ in found.refused:
                replace_directory(path, path.with_name(path.name + ".damaged"))
        parallel.gather_objects(None, _GROUP)
        return found

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """The crash state of a checkpoint; a file is read on every rank."""
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())
        return state

    @staticmethod
    def actor_directory(path: Path) -> Path:
        """What `Actor.load` takes."""
        return path / _ACTOR_DIRECTORY

    def _note(self, report: SaveReport) -> None:
        self._reports.append(report)
        self._failed_in_a_row = self._failed_in_a_row + 1 if report.error else 0
        self._last_error = report.error

    def _commit(self, step: int, partial: Path, records: list[FileRecord]) -> None:
        """On the controller: from here on `step_N` counts, and older ones may go."""
        write_manifest(partial, records)
        replace_directory(partial, self.root / f"step_{step}")
        there = checkpoint_directories(self.root)
        doomed = set(there) - kept(there, self._keep, self._keep_every)
        for path in [*doomed, self.root / f"step_{step}.damaged"]:
            with suppress(OSError):  # what cannot be deleted does no harm
                remove(path)


class _Writing:
    """A save under way: a thread that writes this rank's part and agrees with the other ranks' threads."""

    def __init__(
        self,
        step: int,
        partial: Path,
        snapshot: Snapshot,
        state: str,
        files: Mapping[str, Callable[[], bytes]],
        commit: Callable[[int, Path, list[FileRecord]], None],
        started: float,
    ) -> None:
        self.report: SaveReport | None = None
        self._step, self._partial, self._snapshot = step, partial, snapshot
        self._state, self._files, self._commit, self._started = state, files, commit, started
        # A daemon: a rank that fails must not wait for its disk.
        self._thread = threading.Thread(target=self._run, name=f"save-{step}", daemon=True)
        self._thread.start()

    def wait(self) -> SaveReport:
        self._thread.join()
        assert self.report is not None
        return self.report

    def _run(self) -> None:
        try:
            error = self._save()
        except Exception as lost:  # a group whose member has died; that rank tells why
            error = _reason(lost)
        self.report = SaveReport(self._step, time.monotonic() - self._started, error)

    def _save(self) -> str:
        """Why it failed, the same words on all ranks; empty when it did not."""
        error, written, records = "", None, []
        try:
            written, files = self._snapshot.write()
            records = [record(path, self._partial) for path in files]
        except Exception as failure:
            error = _reason(failure)
        parts = parallel.gather_objects((error, written, records), _GROUP)
        errors = [each for each, _, _ in parts if each]
        if not errors:
            joined = [each for _, _, part in parts for each in part]
            last = _on_rank_zero(lambda: self._complete([each for _, each, _ in parts], joined), _GROUP)
            errors = [last] if last else []
        if errors and parallel.is_rank_zero():
            shutil.rmtree(self._partial, ignore_errors=True)
        return errors[0] if errors else ""

    def _complete(self, written: list[Any], records: list[FileRecord]) -> None:
        state = self._partial / _STATE_FILE
        state.write_text(self._state, encoding="utf-8")
        more = [self._partial / name for name in self._files]
        for path in more:
            path.write_bytes(self._files[path.name]())
        added = [*self._snapshot.finish(written), state, *more]
        for path in added:
            flush(path)
        self._commit(self._step, self._partial, [*records, *(record(path, self._partial) for path in added)])


def _fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    (partial / _ACTOR_DIRECTORY).mkdir(parents=True)


def _manifest(path: Path) -> tuple[list[FileRecord], str]:
    try:
        return read_manifest(path), ""
    except DamagedError as error:
        return [], str(error)


def _on_rank_zero(action: Callable[[], None], group: str) -> str:
    """Do it on the controller; on all ranks why it failed, or nothing."""
    error = ""
    if parallel.is_rank_zero():
        try:
            action()
        except Exception as failure:
            error = _reason(failure)
    return parallel.broadcast_object(error, group)


def _reason(error: BaseException) -> str:
    """One line: the system's words where a file could not be written, however torch wrapped that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}"
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
