"""Sessions: a call can begin with the state in which an earlier one ended. States are files that services may share.

A state belongs to the trajectory (`Call.trajectory_id`, parts joined by "/") that has kept it. Calls of this trajectory
and of those that branch from it, whose ids extend its id, can begin with the state. No other trajectory can read or
replace it.

The caller names states, so that a repeated call is harmless: `state` is where a call begins, `keep` names its end. Two
calls from one state are two branches that do not see each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from tools_sandbox.config import ConfigError
from tools_sandbox.python_tool.pool import PythonPool
from tools_sandbox.python_tool.protocol import Outcome
from tools_sandbox.tool import ToolBroken

TRAJECTORY: ContextVar[str] = ContextVar("trajectory", default="")
"""Trajectory of the running call. The service sets it for each call."""

_FOLDER = "tools_sandbox_states"
"""Folder of the states inside `PythonConfig.session_dir`, which may hold files of others."""
_OWN_FILE = re.compile(r"state-[0-9a-f]{64}|new-\w+")
"""Names of states, and of states that are being written. Files with other names are left alone."""
_TARGET_SHARE = 0.9
"""Share of the size limit that is in use after a cleaning that removes states."""
_UNCHECKED_SHARE = 1 / 16
"""Share of the size limit that a service may write between two looks at the folder, in which others write too."""


class SessionStore:
    """States by name, with a bound on their size. All methods block; several processes may use one folder.

    folder: `PythonConfig.session_dir`. The states are in a folder of their own inside it.
    """

    def __init__(self, folder: Path, limit_mib: int) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self.folder = folder = folder / _FOLDER
        self._limit_bytes = limit_mib << 20
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"python.session_dir: {folder}: {error.strerror}") from error
        self._clean()

    def open(self, trajectory: str, name: str) -> BinaryIO | None:
        """Open the state that a trajectory, or one that it branched from, has kept. None: there is none."""
        for owner in _lineage(trajectory):
            path = self._path(owner, name)
            try:
                state = path.open("rb")
            except FileNotFoundError:
                continue
            with suppress(FileNotFoundError):  # another service may have removed it just now
                os.utime(path)  # the least recently used states are removed first
            return state
        return None

    @contextmanager
    def new(self) -> Iterator[BinaryIO]:
        """Yield an empty file for `keep`, and remove it if it was not kept. Raises OSError."""
        path = self.folder / f"new-{secrets.token_hex(16)}"
        file = path.open("x+b")
        try:
            yield file
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # of a write that has failed before
                file.close()

    def keep(self, state: BinaryIO, trajectory: str, name: str) -> None:
        """Keep a file of `new` as a trajectory's state, in place of its earlier one with that name. Raises OSError."""
        state.flush()
        Path(state.name).replace(self._path(trajectory, name))
        self._unchecked_bytes += state.tell()
        if self._unchecked_bytes > _UNCHECKED_SHARE * self._limit_bytes:
            self._clean()

    def _path(self, owner: str, name: str) -> Path:
        # The length keeps different pairs of owner and name apart.
        digest = hashlib.sha256(f"{len(owner)}:{owner}{name}".encode("utf-8", "surrogatepass"))
        return self.folder / f"state-{digest.hexdigest()}"

    def _clean(self) -> None:
        """Remove the least recently used states if all take too much space, or could before the next cleaning."""
        self._unchecked_bytes = 0
        states: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.folder):
            if _OWN_FILE.fullmatch(entry.name):
                with suppress(OSError):  # another service may be cleaning too
                    states.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        used = sum(size for _, size, _ in states)
        if used > (1 - _UNCHECKED_SHARE) * self._limit_bytes:
            for _, size, path in sorted(states):
                Path(path).unlink(missing_ok=True)
                used -= size
                if used <= _TARGET_SHARE * self._limit_bytes:
                    break


def _lineage(trajectory: str) -> Iterator[str]:
    """Yield a trajectory's id, then those of the trajectories that it branched from, nearest first."""
    yield trajectory
    while "/" in trajectory:
        trajectory = trajectory.rpartition("/")[0]
        yield trajectory


async def run_in_session(
    pool: PythonPool, store: SessionStore | None, code: str, timeout_s: float, *, state: str, keep: str
) -> Outcome:
    """Run code from the state named `state` (empty: none) and keep the state after it as `keep` (empty: do not).

    If a call is ended from outside (limit, crash), `keep` gets the state that the call began with; a note reports it.
    Raises ToolBroken if the first state is gone or the last one cannot be written: the code is not the cause.
    """
    if store is None:
        if state or keep:
            return Outcome("error", "This service has no sessions: python.session_dir is not set.")
        return await pool.run(code, timeout_s)
    with ExitStack() as files:
        begin = None
        if state:
            begin = await asyncio.to_thread(store.open, TRAJECTORY.get(), state)
            if begin is None:  # it was removed to make room
                raise ToolBroken(f"the state {state[:100]!r} is not in {store.folder}", failure="lasting")
            files.enter_context(begin)
        if not keep:
            return await pool.run(code, timeout_s, state=begin)
        try:
            kept = await asyncio.to_thread(files.enter_context, store.new())
            outcome = await pool.run(code, timeout_s, state=begin, keep=kept)
            if not outcome.has_state:
                await asyncio.to_thread(_copy, begin, kept)
            await asyncio.to_thread(store.keep, kept, TRAJECTORY.get(), keep)
        except OSError as error:
            text = f"the state cannot be written to {store.folder}: {error.strerror}"
            raise ToolBroken(text, failure="lasting") from error
        note = "" if outcome.has_state else "\n[the session is as it was before this call]"
        return Outcome(outcome.status, (outcome.text + note).lstrip("\n"))


def _copy(begin: BinaryIO | None, kept: BinaryIO) -> None:
    kept.seek(0)
    kept.truncate()
    if begin is not None:
        begin.seek(0)
        shutil.copyfileobj(begin, kept)
