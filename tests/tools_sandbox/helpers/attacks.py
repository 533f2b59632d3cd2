"""The attacks by family: those of `attacks.txt`, and those that plain text cannot express.

Attacks on holes in the kernel or the processor are out of scope (docs/guides/security.md).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    """One attack and its expected answer."""

    family: str
    name: str
    code: str
    status: tuple[str, ...] = ("ok",)
    expected_texts: tuple[str, ...] = ("",)
    """The answer contains one of them."""
    timeout_s: float = 30.0
    """Short for attacks that must run into it; otherwise long enough for a loaded machine."""

    def source(self, port: int) -> str:
        """Return the code for a service at a port. ESCAPED is spelled differently, since tracebacks quote the code."""
        return self.code.replace("ESCAPED", r"ESC\x41PED").replace("PORT", str(port))


def _from_text() -> list[Attack]:
    attacks = []
    for entry in Path(__file__).with_name("attacks.txt").read_text(encoding="utf-8").split("\n=== ")[1:]:
        heading, _, code = entry.partition("\n")
        family, name, status, timeout_s, texts = (part.strip() for part in heading.split("|"))
        attacks.append(
            Attack(family, name, code, tuple(status.split()), tuple(texts.split(" or ")), float(timeout_s or 30))
        )
    return attacks


ATTACKS = _from_text()


def _add(family: str, name: str, code: str, *status: str, texts: tuple[str, ...]) -> None:
    ATTACKS.append(Attack(family, name, code, status or ("ok",), texts))


_add("text", "NUL in the output", "print('a\\0b')", texts=("a\0b",))
_add("text", "no UTF-8", "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')", texts=("\ufffd",))
_add("text", "NUL in the code", "print(1)\0", "error", texts=("null bytes",))
_add("text", "lone surrogate", "print('\\ud800')", texts=("\\ud800",))
_add("text", "control and direction marks", "print('\\x1b[2J\\u202e\\u2066')", texts=("\u202e",))
_add("text", "deep nesting", "(" * 100_000, "error", texts=("nested", "MemoryError"))

# The filter returns "not permitted", "not implemented" or, for sockets, "unreachable", for any arguments.
_CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *a):
    refused = libc.syscall(*a) < 0 and ctypes.get_errno() in (1, 38, 101)
    print(name, 'refused' if refused else 'ESCAPED')
"""
RAW = {  # target -> name, number on x86_64, arguments
    "other processes": [
        ("ptrace", 101, "0, 0, 0, 0"),
        ("process_vm_readv", 310, "1, 0, 0, 0, 0, 0"),
        ("pidfd_open", 434, "1, 0"),
        ("kcmp", 312, "1, 1, 0, 0, 0"),
        ("prlimit of another", 302, "1, 7, 0, ctypes.create_string_buffer(16)"),
    ],
    "kernel interfaces": [
        ("io_uring_setup", 425, "8, ctypes.create_string_buffer(256)"),
        ("add_key", 248, "b'user', b'a', b'b', 1, -3"),
        ("keyctl", 250, "0, -3, 1"),
        ("perf_event_open", 298, "ctypes.create_string_buffer(256), 0, -1, -1, 0"),
        ("bpf", 321, "0, ctypes.create_string_buffer(256), 128"),
        ("userfaultfd", 323, "1"),
        ("inotify", 294, "0"),
        ("fanotify", 300, "0, 0"),
        ("memfd_secret", 447, "0"),
        ("seccomp again", 317, "1, 0, 0"),
    ],
    "namespaces and mounts": [
        ("unshare", 272, "0x10000000"),
        ("setns", 308, "0, 0"),
        ("clone in a namespace", 56, "0x10000011, 0, 0, 0, 0"),
        ("clone3", 435, "ctypes.create_string_buffer(88), 88"),
        ("mount", 165, "b'x', b'/tmp', b'tmpfs', 0, 0"),
        ("umount", 166, "b'/tmp', 2"),
        ("pivot_root", 155, "b'/tmp', b'/tmp'"),
        ("chroot", 161, "b'/tmp'"),
        ("fsopen", 430, "b'tmpfs', 0"),
        ("open_by_handle_at", 304, "0, 0, 0"),
    ],
    "users and capabilities": [
        ("setuid", 105, "0"),
        ("setgid", 106, "0"),
        ("setgroups", 116, "0, 0"),
        ("capset", 126, "0, 0"),
    ],
    "the machine": [
        ("mknod", 133, "b'x', 0o60666, 0x801"),
        ("init_module", 175, "0, 0, b''"),
        ("kexec_load", 246, "0, 0, 0, 0"),
        ("reboot", 169, "0xfee1dead, 672274793, 0x89abcdef"),
        ("settimeofday", 164, "0, 0"),
        ("sethostname", 170, "b'x', 1"),
        ("swapon", 167, "b'x', 0"),
        ("syslog", 103, "3, 0, 0"),
        ("quotactl", 179, "0, 0, 0, 0"),
        ("iopl", 172, "3"),
        ("setrlimit of core dumps", 160, "4, ctypes.create_string_buffer(16)"),
        ("personality", 135, "0x0040000"),
    ],
    "shared between calls": [
        ("shmget", 29, "0, 4096, 0o1600"),
        ("msgget", 68, "0, 0o1600"),
        ("semget", 64, "0, 1, 0o1600"),
        ("mq_open", 240, "b'x', 0o102, 0o600, 0"),
        ("readahead", 187, "0, 0, 4096"),
    ],
    "huge pages": [
        ("mmap", 9, "0, 2 << 20, 3, 0x40022, -1, 0"),
        ("memfd_create", 319, "b'x', 4"),
        ("shmget", 29, "0, 2 << 20, 0o5600"),
    ],
    "sockets": [
        ("socket", 41, "2, 1, 0"),
        ("x32 socket", 0x40000029, "2, 1, 0"),
    ],
}
if platform.machine() == "x86_64":
    for _target, _calls in RAW.items():
        _lines = [f"call({name!r}, {number}, {arguments})" for name, number, arguments in _calls]
        _add("raw system call", _target, "\n".join([_CALL, *_lines]), texts=(f"{_calls[-1][0]} refused",))
    _add(
        "raw system call",
        "32-bit calls",
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE, 7)\n"
        # mov eax, 359 (socket); int 0x80; ret
        "m.write(bytes.fromhex('b867010000bb02000000b901000000ba00000000cd80c3'))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('ESCAPED' if f() >= 0 else 'refused')",
        "ok",
        "error",
        texts=("refused", "SIGSYS", "SIGSEGV"),
    )
