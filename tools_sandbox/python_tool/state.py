"""The state of a session: the names that code has defined and the files in its working directory, as bytes.

The process that runs the foreign code saves and loads it inside all its walls. No other process ever opens it. A
session is therefore a chain of fresh processes: nothing of it runs between calls, a branch continues from the same
bytes as its siblings, and no state is lost with a service or machine.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import cloudpickle

HEADER = struct.Struct("!8sQQ")
"""Mark, then the lengths of the pickled names and of the files' tar archive, which follow."""
_MARK = b"session2"
_MIB = 1 << 20
_NAMESPACE = "main"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler whose functions keep the session's names as their globals instead of a copy."""

    def __init__(self, file: io.BytesIO, names: dict[str, Any]) -> None:
        super().__init__(file)
        self._names = names
        self.globals_ref[id(names)] = names

    def persistent_id(self, value: object) -> str | None:
        return _NAMESPACE if value is self._names else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: dict[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, key: str) -> dict[str, Any]:
        if key != _NAMESPACE:
            raise pickle.UnpicklingError(f"unknown reference {key!r}")
        return self._names


def save_state(names: dict[str, Any], folder: Path, descriptor: int, limit_mib: int) -> None:
    """Write names and the files of a folder to a descriptor, or nothing if they are too large.

    Report on stdout what cannot be kept. The folder becomes the working directory.

    Names that can be pickled but not unpickled (an exception whose `__init__` takes more arguments) are left out too,
    so that a later call can begin with every state that is kept.
    """
    kept = {name: value for name, value in names.items() if not name.startswith("__")}
    content = _pickle_and_check(kept, names)
    if content is None:
        failing = [name for name, value in kept.items() if _pickle_and_check({name: value}, names) is None]
        lost = {name: type(kept[name]).__name__ for name in failing}
        kept = {name: value for name, value in kept.items() if name not in lost}
        print(f"[not kept for the next call: {', '.join(f'{name} ({kind})' for name, kind in lost.items())}]")
        content = _pickle_and_check(kept, names)
    if content is None:
        print("[state not kept: its names could not be read again]")
        return
    files, unreadable = _pack_files(folder, limit_mib * _MIB)
    if unreadable:
        print(f"[files not kept for the next call: {', '.join(unreadable)}]")
    size = HEADER.size + len(content) + len(files)
    if size > limit_mib * _MIB:
        print(f"[state not kept: it has {size} bytes, at most {limit_mib} MiB are kept]")
        return
    for part in (HEADER.pack(_MARK, len(content), len(files)), content, files):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def pack_state(names: dict[str, Any]) -> bytes:
    """Return a state with names of plain values (numbers, text, bytes, containers) and without files."""
    content = pickle.dumps(names)
    return HEADER.pack(_MARK, len(content), 0) + content


def is_complete_state(begin: bytes, total_bytes: int) -> bool:
    """Return whether bytes with this beginning and number are exactly one state. Its content is not opened."""
    if len(begin) < HEADER.size:
        return False
    mark, *sizes = HEADER.unpack_from(begin)
    return bool(mark == _MARK and HEADER.size + sum(sizes) == total_bytes)


def load_state(state: bytes | bytearray, names: dict[str, Any]) -> None:
    """Load a state's names into a namespace and its files into the working directory. Raises ValueError."""
    try:
        _load(state, names)
    except Exception as error:  # only code that forges a state on purpose causes this: see `save_state`
        raise ValueError(f"the state of the session cannot be read ({type(error).__name__})") from None


def _load(state: bytes | bytearray, names: dict[str, Any]) -> None:
    _, size, _ = HEADER.unpack_from(state)
    content, files = state[HEADER.size :][:size], state[HEADER.size + size :]
    if files:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall()  # noqa: S202 - the session's files, in its own folder
    # One object, so that objects which names share stay shared.
    names.update(_Unpickler(io.BytesIO(content), names).load())


def _pickle_and_check(kept: dict[str, Any], names: dict[str, Any]) -> bytes | None:
    """Return pickled names that can be unpickled, or None."""
    try:
        content = _pickle(kept, names)
        _Unpickler(io.BytesIO(content), dict(names)).load()
    except Exception:
        return None
    return content


def _pickle(kept: dict[str, Any], names: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, names).dump(kept)
    return file.getvalue()


def _pack_files(folder: Path, limit_bytes: int) -> tuple[bytes, list[str]]:
    """Return a tar archive of what a folder holds, b"" for nothing, and the names that cannot be read."""
    try:
        os.chdir(folder)  # the code may have changed the working directory
        paths = sorted(Path().rglob("*"))
    except OSError:  # the code may have removed it
        return b"", [str(folder)]
    file, unreadable = io.BytesIO(), list[str]()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            try:
                if not path.is_symlink() and not os.access(path, os.R_OK):
                    raise PermissionError  # `rglob` passes over what is in such a folder
                if (path.is_file() or path.is_dir() or path.is_symlink()) and file.tell() <= limit_bytes:
                    archive.add(path, recursive=False)
            except OSError:
                unreadable.append(str(path))
    return file.getvalue() if paths else b"", unreadable
