"""Checkpoints: directories that are either whole or absent, written while training continues.

A save writes into `step_N.tmp`: each rank its own files, then a manifest with the checksum of every file. The rename to
`step_N` makes the checkpoint count. A save that fails earlier leaves older checkpoints as they were, and its `.tmp` is
removed. Training waits only for the copy of the state to host memory. A thread on every rank writes and agrees with the
other ranks over a separate gloo group, so a failure is known at the next step. A write that hangs is logged at
intervals (`save_watch.py`).
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
    find_damaged_files,
    read_manifest,
    record_file,
    write_manifest,
)
from arpo_megatron.actor.save_watch import INTERVAL_S, SaveWatch
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.checkpoint_dirs import checkpoint_directories, kept
from arpo_megatron.utils.atomic import flush, remove, replace_directory

MAX_FAILED_SAVES = 3
"""Saves that may fail in a row (for example on a full disk) before the run stops."""
_STATE_FILE = "state.json"
_ACTOR_DIRECTORY = "actor"
_GROUP = "checkpoint"


class Snapshot(Protocol):
    """A state at one moment, copied and ready to be written."""

    def write(self) -> tuple[Any, list[Path]]:
        """Write this rank's part, in any thread; return the rank's entry for `finish` and the files written."""

    def finish(self, written: list[Any]) -> list[Path]:
        """Write the files that join all ranks' parts and return them; only rank 0 calls it, with every rank's entry."""


class Saveable(Protocol):
    """An object whose state can be saved: the actor."""

    def snapshot(self, directory: Path) -> Snapshot:
        """Copy the state for an existing empty directory; all ranks call it."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Outcome of one save; `str()` is its line in the log."""

    step: int
    """Step of the checkpoint."""
    error: str = ""
    """Why there is no checkpoint; empty on success."""

    def __str__(self) -> str:
        if not self.error:
            return f"step_{self.step} is saved"
        return f"step_{self.step} could not be saved: {self.error}; older checkpoints are intact"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest intact checkpoint, and the newer ones that are damaged."""

    path: Path | None
    """The newest intact checkpoint; None if there are no checkpoints."""
    refused: tuple[tuple[Path, str], ...] = ()
    """Newer, damaged checkpoints and what is wrong with each."""

    @property
    def warnings(self) -> list[str]:
        """Lines for the log, one per damaged checkpoint: its name and its damage."""
        return [f"{path.name} is not used: {why}" for path, why in self.refused]


def find_damage(path: Path) -> list[str]:
    """Check the files of a checkpoint; each rank reads a share of them and all ranks get the same answer.

    Returns:
        One phrase per damaged file; empty if the checkpoint is intact.
    """
    records, unreadable = parallel.broadcast_object(_manifest(path) if parallel.is_rank_zero() else ([], ""))
    if unreadable:
        return [unreadable]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = records[dist.get_rank() if ranks > 1 else 0 :: ranks]
    return [phrase for part in parallel.gather_objects(find_damaged_files(path, mine)) for phrase in part]


def newest_intact(root: Path) -> ResumePoint:
    """Check the checkpoints at `root` from the newest to the first intact one; all ranks call it.

    Raises:
        UserError: there are checkpoints, but none is intact. Only the user may decide to start over.
    """
    refused: list[tuple[Path, str]] = []
    for path in parallel.broadcast_object(checkpoint_directories(root)[::-1]):
        if not (phrases := find_damage(path)):
            return ResumePoint(path, tuple(refused))
        refused.append((path, phrases[0] + (f" and {len(phrases) - 1} more" if len(phrases) > 1 else "")))
    if refused:
        damaged = "; ".join(ResumePoint(None, tuple(refused)).warnings)
        raise UserError(f"no checkpoint in {root} is intact ({damaged}): restore one, or delete them all")
    return ResumePoint(None)


class CheckpointStore:
    """The checkpoints `root/step_N` of a run, on a file system that all ranks share; all ranks call every method.

    Args:
        root: created if missing; leftovers of interrupted saves in it are removed.
        keep: number of newest checkpoints to keep.
        keep_every: also keep the checkpoints of every n-th step; 0 keeps none.
        best: chooses more checkpoints to keep among all of them.
        log: takes a line about a save that takes long, in a thread of rank 0.
        log_every_s: interval of these lines in seconds.
        group: name of the process group of this store's saves; two stores that save at the same time have two.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        keep_every: int = 0,
        best: Callable[[Sequence[Path]], AbstractSet[Path]] = lambda paths: set(),
        *,
        log: Callable[[str], None] = lambda line: None,
        log_every_s: float = INTERVAL_S,
        group: str = _GROUP,
    ) -> None:
        self.root, self._group = root, group
        self._log, self._log_every_s = log, log_every_s
        self._keep = keep
        self._keep_every = keep_every
        self._best = best
        self._writing: _Writing | None = None
        self._reports: list[SaveReport] = []
        self._failed_in_a_row = 0
        self._last_error = ""
        if parallel.is_rank_zero():
            root.mkdir(parents=True, exist_ok=True)
            for stale in root.glob("step_*.tmp"):  # other files are not this store's
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        parallel.gather_objects(None, group)  # makes the group, and is a barrier

    def save(
        self,
        step: int,
        actor: Saveable,
        crash_state: dict[str, Any],
        files: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> None:
        """Start writing `step_N`, after the previous save has ended. `reports` returns the result.

        Args:
            step: N; an older checkpoint of the same step is replaced.
            actor: the training state at this moment.
            crash_state: all other state that must survive a crash, JSON-safe; rank 0's is written.
            files: more files, as functions that return contents by name; rank 0 calls and writes them in its thread.

        Raises:
            TypeError: `crash_state` is not JSON-safe.
            UserError: the last `MAX_FAILED_SAVES` saves all failed.
        """
        self.finish()
        if self._failed_in_a_row >= MAX_FAILED_SAVES:
            raise UserError(
                f"{self._failed_in_a_row} checkpoints in a row could not be saved ({self._last_error}): "
                f"fix {self.root} and restart with --resume"
            )
        state = json.dumps(crash_state)
        partial = self.root / f"step_{step}.tmp"
        watch = SaveWatch(partial, self._log, self._log_every_s)
        if error := _on_rank_zero(lambda: _make_empty(partial), "control"):
            watch.end()
            self._note(SaveReport(step, error))
            return
        snapshot = actor.snapshot(partial / _ACTOR_DIRECTORY)
        self._writing = _Writing(step, partial, snapshot, state, files, self._commit, watch, self._group)

    def reports(self) -> list[SaveReport]:
        """Return the results of saves that ended since the last call, without waiting."""
        if self._writing is not None and self._writing.report is not None:
            self._note(self._writing.report)
            self._writing = None
        ended, self._reports = self._reports, []
        return ended

    def finish(self) -> None:
        """Wait until the save in flight has ended."""
        if self._writing is not None:
            self._note(self._writing.wait())
            self._writing = None

    def resume_point(self) -> ResumePoint:
        """Return `newest_intact`, and rename newer damaged checkpoints to `step_N.damaged` so that they do not count.

        Raises:
            UserError: there are checkpoints, but none is intact.
        """
        found = newest_intact(self.root)
        if parallel.is_rank_zero():
            for path, _ in found.refused:
                replace_directory(path, path.with_name(path.name + ".damaged"))
        parallel.gather_objects(None, self._group)
        return found

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """Read the crash state of a checkpoint; every rank reads the file."""
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())
        return state

    @staticmethod
    def actor_directory(path: Path) -> Path:
        """Return the directory that `Actor.load` takes."""
        return path / _ACTOR_DIRECTORY

    def _note(self, report: SaveReport) -> None:
        self._reports.append(report)
        self._failed_in_a_row = self._failed_in_a_row + 1 if report.error else 0
        self._last_error = report.error

    def _commit(self, step: int, partial: Path, records: list[FileRecord]) -> None:
        """Make `step_N` count and delete checkpoints that need not be kept; rank 0 calls it."""
        write_manifest(partial, records)
        replace_directory(partial, self.root / f"step_{step}")
        there = checkpoint_directories(self.root)
        doomed = set(there) - kept(there, self._keep, self._keep_every) - self._best(there)
        for path in [*doomed, self.root / f"step_{step}.damaged"]:
            with suppress(OSError):  # what cannot be deleted does no harm
                remove(path)


class _Writing:
    """A save in flight: a thread that writes this rank's part and agrees with the threads of the other ranks."""

    def __init__(
        self,
        step: int,
        partial: Path,
        snapshot: Snapshot,
        state: str,
        files: Mapping[str, Callable[[], bytes]],
        commit: Callable[[int, Path, list[FileRecord]], None],
        watch: SaveWatch,
        group: str,
    ) -> None:
        self.report: SaveReport | None = None
        self._step, self._partial, self._snapshot = step, partial, snapshot
        self._state, self._files, self._commit, self._watch, self._group = state, files, commit, watch, group
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
        except Exception as lost:  # a member of the group has died; that rank logs why
            error = _reason(lost)
        self._watch.end()
        self.report = SaveReport(self._step, error)

    def _save(self) -> str:
        """Write, and return why that failed, equal on all ranks; empty on success."""
        error, written, records = "", None, []
        try:
            written, files = self._snapshot.write()
            records = [record_file(path, self._partial) for path in files]
        except Exception as failure:
            error = _reason(failure)
        self._watch.rank_has_written()
        parts = parallel.gather_objects((error, written, records), self._group)
        errors = [each for each, _, _ in parts if each]
        if not errors:
            joined = [each for _, _, part in parts for each in part]
            last = _on_rank_zero(lambda: self._complete([each for _, each, _ in parts], joined), self._group)
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
        self._commit(self._step, self._partial, [*records, *(record_file(path, self._partial) for path in added)])


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    (partial / _ACTOR_DIRECTORY).mkdir(parents=True)


def _manifest(path: Path) -> tuple[list[FileRecord], str]:
    try:
        return read_manifest(path), ""
    except DamagedError as error:
        return [], str(error)


def _on_rank_zero(action: Callable[[], None], group: str) -> str:
    """Run an action on rank 0; return on all ranks why it failed, or an empty string."""
    error = ""
    if parallel.is_rank_zero():
        try:
            action()
        except Exception as failure:
            error = _reason(failure)
    return parallel.broadcast_object(error, group)


def _reason(error: BaseException) -> str:
    """Describe an error in one line: the message of the operating system if there is one, however torch wrapped it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}"
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
