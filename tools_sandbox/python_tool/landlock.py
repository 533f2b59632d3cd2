"""Landlock: a second wall around files in addition to namespaces, and the only one without them.

It needs no privileges and no namespaces. From Linux 6.12 on it also keeps signals and abstract sockets inside.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from contextlib import suppress

from tools_sandbox.utils import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files by ABI version."""

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE_TO = _READ_FILE | _WRITE_FILE | _TRUNCATE
"""Read and write existing files, such as devices."""
ALL = -1
"""All rights except the creation of devices."""
_DEVICES = 1 << 6 | 1 << 11

SIGNALS_ABI = 6
"""ABI version from which on signals stay inside too."""


def abi() -> int:
    """Return the ABI version of this kernel; 0: no Landlock."""
    try:
        return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))
    except OSError:
        return 0


def restrict(version: int, rules: list[tuple[str, int]]) -> None:
    """Allow this process what the rules name (existing path -> READ, WRITE_TO, ALL) and nothing else, for good.

    version: the result of `abi`. From version 4 on, no port can be bound or connected to. Needs no_new_privs.
    Raises OSError.
    """
    handled = (1 << max(count for since, count in _RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", 0b11)  # TCP bind and connect; no rule allows any
    if version >= SIGNALS_ABI:
        attributes += struct.pack("=Q", 0b11)  # abstract sockets and signals
    ruleset = linux.syscall(
        _CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    try:
        for path, rights in rules:
            with suppress(FileNotFoundError):
                _allow(ruleset, path, rights & handled & ~_DEVICES)
        linux.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        linux.syscall(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0)
        )
    finally:
        os.close(descriptor)
