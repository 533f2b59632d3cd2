"""The few Linux calls that Python 3.11 does not offer, through ctypes. Each raises OSError, as `os` would."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x1, 0x2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by CLONE_* flags for new ones."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a file system of a kind ("proc", "tmpfs"), or with kind "" change the flags of a mount."""
    name = kind.encode() or None
    result = _libc.mount(name, target.encode(), name, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def bind(source: str, target: str) -> None:
    """Make a folder visible at a second place, with the flags (read-only) of the first."""
    # With what is mounted inside: a user namespace does not let a mount be parted from those above it.
    result = _libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(MS_BIND | MS_REC), None)
    _checked(result, f"bind {target}")


def make_mounts_read_only() -> None:
    """Make every mount of the own mount namespace read-only and deaf to set-user-id bits (Linux 5.12)."""

    class _Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]

    attributes = _Attributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(b"/"),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(result, "mount_setattr")


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl({option})")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal to this process when the thread that forked it ends. A change of uid undoes it."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """No exec of this process or its children gains privileges (set-user-id programs, file capabilities)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability, for good."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability of this kernel, or already without the right to drop
            break
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
