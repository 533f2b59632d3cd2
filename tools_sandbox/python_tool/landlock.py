"""Landlock: a second wall around files where there are namespaces, and the only one where there are none.

It needs no privilege and no namespace. Besides files it keeps signals and abstract sockets inside (Linux 6.12).
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
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""ABI version -> how many rights there are on files."""

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE_TO = _READ_FILE | _WRITE_FILE | _TRUNCATE
"""Write existing files, such as devices."""
ALL = -1
"""Everything, but for making devices."""
_DEVICES = 1 << 6 | 1 << 11

SIGNALS_ABI = 6
"""From this version on signals stay inside too."""


def abi() -> int:
    """The version that this kernel offers; 0: none."""
    try:
        return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))
    except OSError:
        return 0


def restrict(version: int, rules: list[tuple[str, int]]) -> None:
    """Allow what rules say (path that exists -> READ, WRITE_TO, ALL), and nothing else, for good. OSError: failed.

    version: as `abi` said. Ports cannot be bound or connected to from version 4 on. Needs no_new_privs.
    """
    handled = (1 << max(count for since, count in _RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", 0b11)  # TCP bind and connect, without a rule that allows any
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
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        linux.syscall(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0)
        )
    finally:
        os.close(place)
