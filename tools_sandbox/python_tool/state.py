"""The state of a session: the names that code has defined, and the files in its working directory, as bytes.

Made and read by the process that runs the foreign code, behind all its walls; nobody else ever opens it. So a session
is a chain of fresh processes rather than one that lives on: nothing of it runs between calls, a branch of a tree
continues from the same bytes as its siblings, and a service or machine that dies takes no state along.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import cloudpickle

_HEADER = struct.Struct("!8sQ32s")
"""Mark, bytes of the pickled names, SHA-256 of all that follows: the names, and the files as a tar archive."""
_MARK = b"session1"
_MIB = 1 << 20
_MAIN = "main"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Functions keep the session's names as their globals instead of a copy of those they use."""

    def __init__(self, file: io.BytesIO, names: dict[str, Any]) -> None:
        super().__init__(file)
        self._names = names
        self.globals_ref[id(names)] = names

    def persistent_id(self, value: object) -> str | None:
        return _MAIN if value is self._names else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: dict[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, key: str) -> dict[str, Any]:
        if key != _MAIN:
            raise pickle.UnpicklingError(f"unknown reference {key!r}")
        return self._names


def save(names: dict[str, Any], descriptor: int, limit_mb: int) -> None:
    """Write the state to a descriptor; what cannot be kept is said on stdout. Writes nothing if it is too large.

    Names that could be written but not read (an exception whose `__init__` takes more) are not kept either: a state
    that was kept can be gone on from.
    """
    kept = {name: value for name, value in names.items() if not name.startswith("__")}
    content = _tried(kept, names)
    if content is None:
        lost = {name: type(value).__name__ for name, value in kept.items() if _tried({name: value}, names) is None}
        kept = {name: value for name, value in kept.items() if name not in lost}
        print(f"[not kept for the next call: {', '.join(f'{name} ({kind})' for name, kind in lost.items())}]")
        content = _tried(kept, names)
    if content is None:
        print("[state not kept: its names could not be read again]")
        return
    files = _packed_files(limit_mb * _MIB)
    size = _HEADER.size + len(content) + len(files)
    if size > limit_mb * _MIB:
        print(f"[state not kept: it has {size} bytes, at most {limit_mb} MiB are kept]")
        return
    digest = hashlib.sha256(content + files).digest()
    rest = memoryview(_HEADER.pack(_MARK, len(content), digest) + content + files)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def is_whole(state: bytes) -> bool:
    """Whether bytes are one state, all of it and nothing else. Says nothing of what is in it, and does not look."""
    if len(state) < _HEADER.size:
        return False
    mark, size, digest = _HEADER.unpack_from(state)
    rest = memoryview(state)[_HEADER.size :]
    return bool(mark == _MARK and size <= len(rest) and hashlib.sha256(rest).digest() == digest)


def load(state: bytes | bytearray, names: dict[str, Any]) -> None:
    """Put a state's names into a namespace and its files into the working directory. ValueError: it is none."""
    try:
        _load(state, names)
    except Exception as error:  # only code that meant to can have made such a state: see `save`
        raise ValueError(f"the state of the session cannot be read ({type(error).__name__})") from None


def _load(state: bytes | bytearray, names: dict[str, Any]) -> None:
    _, size, _ = _HEADER.unpack_from(state)
    content, files = state[_HEADER.size :][:size], state[_HEADER.size + size :]
    if files:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall()  # noqa: S202 - its own files, in its own folder
    # One object, so that what names share stays shared.
    names.update(_Unpickler(io.BytesIO(content), names).load())


def _tried(kept: dict[str, Any], names: dict[str, Any]) -> bytes | None:
    """Names as bytes that have been read again; None if they cannot be made, or not be read."""
    try:
        content = _pickled(kept, names)
        _Unpickler(io.BytesIO(content), dict(names)).load()
    except Exception:
        return None
    return content


def _pickled(kept: dict[str, Any], names: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, names).dump(kept)
    return file.getvalue()


def _packed_files(limit_bytes: int) -> bytes:
    if not any(Path().iterdir()):
        return b""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(Path().rglob("*")):
            if (path.is_file() or path.is_dir() or path.is_symlink()) and file.tell() <= limit_bytes:
                archive.add(path, recursive=False)
    return file.getvalue()
