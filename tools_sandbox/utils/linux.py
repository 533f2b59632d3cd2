"""Linux system calls that Python 3.11 does not offer, through ctypes. Each raises OSError, like `os`."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

MACHINE = platform.machine()
"""Architecture. There is a system call filter for x86_64 and aarch64 only."""

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 15, 36, 38, 41
_SECCOMP_MODE_FILTER = 2
_MADV_COLLAPSE = 25
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# From here on, new system calls have the same number on every architecture.
_SYS_MOUNT_SETATTR = 442
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x1, 0x2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class _Program(ctypes.Structure):
    """`struct sock_fprog` of Linux."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces, given by CLONE_* flags."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a file system of a kind ("proc", "tmpfs"). With kind "", change the flags of a mount."""
    name = kind.encode() or None
    result = _libc.mount(name, target.encode(), name, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def bind(source: str, target: str) -> None:
    """Make a folder visible at a second path, with the flags (read-only) of the first."""
    # Recursively: in a user namespace, a mount cannot be separated from the mounts below it.
    result = _libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(MS_BIND | MS_REC), None)
    _checked(result, f"bind {target}")


def make_mounts_read_only(target: str) -> None:
    """Make a mount and those inside it read-only and ignore set-user-id bits there (Linux 5.12)."""

    class _Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]

    attributes = _Attributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    syscall(
        _SYS_MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def change_root(folder: str) -> None:
    """Make a mount the root of this mount namespace and detach the old root with all its mounts."""
    os.chdir(folder)
    # The old root is stacked on top of the new one and then unmounted, so no folder for it is needed.
    syscall(_SYS_PIVOT_ROOT[MACHINE], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel by number. Arguments are ctypes values."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    _checked(result, f"system call {number}")
    return result


def _prctl(option: int, argument: int, second: int = 0) -> None:
    _checked(_libc.prctl(option, argument, second, 0, 0), f"prctl({option})")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal to this process when its parent thread ends. A change of uid undoes this."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Forbid this process and its children to gain privileges by exec (set-user-id programs, file capabilities)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def name_process(name: str) -> None:
    """Set the name of this process and its children in `ps` and `top`; at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode("ascii"))
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def make_dumpable(dumpable: bool) -> None:
    """Allow or forbid core dumps and access by processes of the same user (ptrace, /proc/PID/mem)."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def disable_huge_pages() -> None:
    """Keep the kernel from using transparent huge pages in this process, its children and the programs they execute."""
    _prctl(_PR_SET_THP_DISABLE, 1)


def collapse_into_huge_pages() -> None:
    """Move the private memory of this process to huge pages as far as possible (Linux 6.1), to make its forks fast."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            # Fails for a range that holds no whole huge page, and on kernels that cannot do it.
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def filter_system_calls(program: bytes) -> None:
    """Filter every system call of this process and its children by a BPF program (see `seccomp`), for good."""
    filter_ = _Program(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_))


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
