"""The system calls that foreign code may make: those for computing, files, processes and pipes, and no others.

The filter is assembled here, for prctl(PR_SET_SECCOMP), and not by libseccomp, so that the service works after a plain
`pip install` without that library. The numbers come from the kernel's tables.
"""

from __future__ import annotations

import errno
import struct

from tools_sandbox.utils import linux

# Left out because the kernel counts them per user and not per call, so one call could exhaust them for all others and
# the service: epoll (watches; `worker` makes asyncio use poll), sendmsg and sendmmsg (descriptors in flight).
# flock is left out too: calls read files of the machine, and a reader can lock them for everyone. So is readahead,
# which fills the machine's page cache without use.
# Format: name:x86_64:aarch64. An empty number means that the architecture does not have the call.
_ALLOWED = """
    read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 open:2: openat:257:56 openat2:437:437 creat:85: close:3:57
    close_range:436:436 lseek:8:62 stat:4: fstat:5:80 lstat:6: newfstatat:262:79 statx:332:291 statfs:137:43
    fstatfs:138:44 access:21: faccessat:269:48 faccessat2:439:439 dup:32:23 dup2:33: dup3:292:24
    fsync:74:82 fdatasync:75:83 sync_file_range:277:84
    truncate:76:45 ftruncate:77:46 fallocate:285:47 getdents:78: getdents64:217:61 getcwd:79:17 chdir:80:49
    fchdir:81:50 rename:82: renameat:264:38 renameat2:316:276 mkdir:83: mkdirat:258:34 rmdir:84: link:86:
    linkat:265:37 unlink:87: unlinkat:263:35 symlink:88: symlinkat:266:36 readlink:89: readlinkat:267:78
    chmod:90: fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132: utimes:235: utimensat:280:88
    futimesat:261: umask:95:166 sendfile:40:71 copy_file_range:326:285 pipe:22: pipe2:293:59 chown:92:
    fchown:93:55 lchown:94: fchownat:260:54 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
    llistxattr:195:12 flistxattr:196:13

    poll:7: ppoll:271:73 select:23: pselect6:270:72 eventfd:284: eventfd2:290:19 timerfd_create:283:85
    timerfd_settime:286:86 timerfd_gettime:287:87 signalfd:282: signalfd4:289:74 nanosleep:35:101
    clock_nanosleep:230:115 pause:34:

    munmap:11:215 mremap:25:216 mprotect:10:226 msync:26:227 mincore:27:232 brk:12:214
    mlock:149:228 munlock:150:229 mlock2:325:284 mlockall:151:230 munlockall:152:231 membarrier:324:283
    pkey_alloc:330:289 pkey_free:331:290 pkey_mprotect:329:288 get_mempolicy:239:236

    fork:57: vfork:58: execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
    getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155 setpgid:109:154 getpgrp:111: getsid:124:156
    setsid:112:157 kill:62:129 tkill:200:130 tgkill:234:131 set_tid_address:218:96 set_robust_list:273:99
    get_robust_list:274:100 futex:202:98 futex_waitv:449:449 rseq:334:293 arch_prctl:158: sched_yield:24:124
    sched_getaffinity:204:123 sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120
    sched_getattr:315:275 sched_get_priority_max:146:125 sched_get_priority_min:147:126
    sched_rr_get_interval:148:127 getpriority:140:141 setpriority:141:140 getcpu:309:168 getrlimit:97:163
    getrusage:98:165 times:100:153 ioprio_get:252:31

    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 rt_sigsuspend:130:133 sigaltstack:131:132
    restart_syscall:219:128 alarm:37: getitimer:36:102 setitimer:38:103 timer_create:222:107
    timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111

    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
    getgroups:115:158 capget:125:90 uname:63:160 sysinfo:99:179 time:201: gettimeofday:96:169
    clock_gettime:228:113 clock_getres:229:114 getrandom:318:278

    shutdown:48:210 getsockname:51:204 getpeername:52:205 getsockopt:55:209
"""
_CHECKED = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "prctl": (157, 167),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "mmap": (9, 222),
    "madvise": (28, 233),
    "fadvise64": (221, 223),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
}
"""Calls that are allowed only after a check (`_checks`). A check of a name in `_ALLOWED` applies, too."""
_LAST_KNOWN = 452
"""Later calls return "not implemented", for which libraries have a fallback; known ones return "not permitted"."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED_CLONE_FLAGS = 0x7E020000 | 0x8000
"""Every CLONE_NEW* flag, and CLONE_PARENT: the parent of a process must be its creator (see `watchdog`)."""
_UNIX, _STREAM, _TYPE_MASK = 1, 1, 0xF
_PRIO_PROCESS = 0
# PDEATHSIG, GET_PDEATHSIG, GET_DUMPABLE, SET/GET_NAME, GET_SECCOMP, CAPBSET_READ, GET_TIMERSLACK, SET/GET_NO_NEW_PRIVS,
# GET_TID_ADDRESS, SET_VMA
_PRCTL = (1, 2, 3, 15, 16, 21, 23, 30, 38, 39, 40, 0x53564D41)
# F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, GETPIPE_SZ; GETLK, SETLK, SETLKW, which SQLite needs: an exclusive
# record lock needs write access to the file.
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032, 5, 6, 7)
_FADVICE = (0, 1, 2, 5)
"""NORMAL, RANDOM, SEQUENTIAL, NOREUSE. WILLNEED fills the machine's page cache, DONTNEED evicts it for everyone."""
_REFUSED_MADVICE = (3, 12, 20, 21, 22)
"""WILLNEED and POPULATE_READ fill the machine's page cache. MERGEABLE shares pages with other processes. COLD and
PAGEOUT also evict the page cache of files."""
_FLUSHES = ("fsync", "fdatasync", "sync_file_range", "msync")
_CHANGES_OF_FILES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "utimensat", "futimesat"),
)
_SYNC, _WRITE_SYNC = 0x101000, 0x6
"""O_SYNC and O_DSYNC of a file; RWF_SYNC and RWF_DSYNC of one write."""
_MAP_HUGETLB = 0x40000
_SHARED_ANONYMOUS = 0x21
_MSG_OOB = 1
_RLIMIT_CORE = 4
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

_LOAD, _AND, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NOTHING_DONE = _ERRNO | 0
"""The call reports success, and the kernel does nothing."""
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16


def available() -> bool:
    """Return whether there is a filter for this machine's architecture."""
    return linux.MACHINE in _ARCHITECTURES


def program(machine: str = linux.MACHINE, *, among_others: bool) -> bytes:
    """Return the filter for an architecture ("x86_64" or "aarch64"; else KeyError) with 8 bytes per instruction.

    among_others: the call has no PID namespace. It must not reach other processes by their numbers, and must stay in
    its process group, so that one signal can end it (see `process_tree.end_tree`).
    """
    column = list(_ARCHITECTURES).index(machine)
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD, _NUMBER),
        # The x32 numbering of x86_64 also lies above the last known number.
        *_returning(_op(_GREATER, _LAST_KNOWN, 0, 1), _ERRNO | errno.ENOSYS),
    ]
    allowed = {name: int(numbers[column]) for name, *numbers in map(_fields, _ALLOWED.split()) if numbers[column]}
    checked = allowed | {name: numbers[column] for name, numbers in _CHECKED.items()}
    for name, check in (_checks() | (_checks_among_others() if among_others else {})).items():
        if name in checked:  # else the architecture does not have the call
            code += [_op(_EQUAL, checked[name], 0, len(check)), *check]
    for low, high in _ranges(sorted(allowed.values())):
        code += [
            _op(_GREATER, high, 3, 0),
            _op(_AT_LEAST, low, 0, 1),
            _op(_RETURN, _ALLOW),
            _op(_RETURN, _ERRNO | errno.EPERM),
        ]
    return b"".join([*code, _op(_RETURN, _ERRNO | errno.EPERM)])


def _fields(entry: str) -> list[str]:
    return entry.split(":")


def _checks() -> dict[str, list[bytes]]:
    """Return the checks of system calls whose arguments decide. Each check ends with a return."""
    allow, refuse = _op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | errno.EPERM)
    return {
        "clone": _without_flags(0, _REFUSED_CLONE_FLAGS),
        # Its flags are in memory, which a filter cannot read. glibc falls back to clone.
        "clone3": [_op(_RETURN, _ERRNO | errno.ENOSYS)],
        # There is nothing to reach, which this error expresses.
        "socket": [_op(_RETURN, _ERRNO | errno.ENETUNREACH)],
        # Only connected pairs. They have no name, so no other call can find them.
        "socketpair": [
            *(_argument(0), _op(_EQUAL, _UNIX, 0, 4)),
            *(_argument(1), _op(_AND, _TYPE_MASK), _op(_EQUAL, _STREAM, 0, 1), allow),
            refuse,
        ],
        "prctl": [_argument(0), *_one_of(_PRCTL), refuse],
        "fcntl": [_argument(1), *_one_of(_FCNTL), _op(_RETURN, _ERRNO | errno.EINVAL)],
        "ioctl": [_argument(1), *_one_of(_IOCTL), _op(_RETURN, _ERRNO | errno.ENOTTY)],
        # `isolation.forbid_core_dumps` needs its limit unchanged.
        "setrlimit": [_argument(0), _op(_EQUAL, _RLIMIT_CORE, 0, 1), refuse, allow],
        # Only limits of the calling process. The limit for core dumps can be read: the new limit is a null pointer.
        "prlimit64": [
            *(_argument(0), _op(_EQUAL, 0, 1, 0), refuse),
            *(_argument(1), _op(_EQUAL, _RLIMIT_CORE, 1, 0), allow),
            *(_argument(2), _op(_EQUAL, 0, 1, 0), refuse),
            *(_argument(2, high=True), _op(_EQUAL, 0, 1, 0), refuse, allow),
        ],
        # Huge pages are a pool of the machine. Shared memory without a file can be in use although no process has it
        # mapped, so that only control groups could count it.
        "mmap": [
            *(_argument(3), _op(_AND, _SHARED_ANONYMOUS), _op(_EQUAL, _SHARED_ANONYMOUS, 0, 1), refuse),
            *_without_flags(3, _MAP_HUGETLB),
        ],
        "madvise": [_argument(2), *_one_of(_REFUSED_MADVICE, _ERRNO | errno.EPERM), allow],
        "fadvise64": [_argument(3), *_one_of(_FADVICE), refuse],
        # Urgent data of local sockets: rarely used and rarely tested code of the kernel.
        "sendto": _without_flags(3, _MSG_OOB),
        "recvfrom": _without_flags(3, _MSG_OOB),
        "recvmsg": _without_flags(2, _MSG_OOB),
        "recvmmsg": _without_flags(3, _MSG_OOB),
        # Each would flush the disk of the machine, also for a file that is only read. Nothing of a call must last.
        **{name: [_op(_RETURN, _NOTHING_DONE)] for name in _FLUSHES},
        "open": _without_flags(1, _SYNC),
        "openat": _without_flags(2, _SYNC),
        # Its flags are in memory. Callers fall back to openat.
        "openat2": [_op(_RETURN, _ERRNO | errno.ENOSYS)],
        "pwritev2": _without_flags(5, _WRITE_SYNC),
    }


def _checks_among_others() -> dict[str, list[bytes]]:
    allow, refuse = _op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | errno.EPERM)
    nothing_done = [_op(_RETURN, _NOTHING_DONE)]  # programs that create a session also work without one
    own = [_argument(0), _op(_EQUAL, 0, 0, 1), allow, refuse]
    # Larger numbers are the CPU clocks of other processes.
    clocks = [_argument(0), _op(_GREATER, 0x7FFFFFFF, 0, 1), refuse, allow]
    return {
        "setsid": nothing_done,
        "setpgid": nothing_done,
        # RLIMIT_FSIZE does not count blocks beyond the end of the file, which only the disk of a call would bound.
        "fallocate": [_argument(1), _op(_EQUAL, 0, 1, 0), _op(_RETURN, _ERRNO | errno.EOPNOTSUPP), allow],
        # Negative numbers are all processes of the user, and groups of processes. The call's own group is 0.
        "kill": [_argument(0), _op(_GREATER, 0x7FFFFFFF, 0, 1), refuse, allow],
        "setpriority": [
            *(_argument(0), _op(_EQUAL, _PRIO_PROCESS, 0, 3)),
            *(_argument(1), _op(_EQUAL, 0, 0, 1), allow),
            refuse,
        ],
        "sched_setaffinity": own,
        "clock_gettime": clocks,
        "clock_nanosleep": clocks,
        "timer_create": clocks,
        # Landlock has no right for these, so they would reach every file of the user.
        **dict.fromkeys(_CHANGES_OF_FILES, nothing_done),
    }


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction. Jumps count the instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(index: int, *, high: bool = False) -> bytes:
    return _op(_LOAD, _FIRST_ARGUMENT + 8 * index + (4 if high else 0))


def _returning(test: bytes, value: int) -> list[bytes]:
    return [test, _op(_RETURN, value)]


def _one_of(values: tuple[int, ...], result: int = _ALLOW) -> list[bytes]:
    return [part for value in values for part in _returning(_op(_EQUAL, value, 0, 1), result)]


def _without_flags(index: int, flags: int) -> list[bytes]:
    """Allow a call unless an argument has one of the flags."""
    return [
        *(_argument(index), _op(_AND, flags), _op(_EQUAL, 0, 1, 0)),
        *(_op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW)),
    ]


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
