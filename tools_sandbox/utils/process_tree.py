"""The end of a process with all its descendants."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def can_list_children() -> bool:
    """Return whether this kernel lists the children of a process."""
    return _children_file(os.getpid()).exists()


def end_tree(first_pid: int) -> None:
    """Kill and reap every descendant of this process, including those that have left their parent.

    This process must adopt orphans (`linux.adopt_orphans`). A PID namespace ends with its first process. In a python
    call without one, the worker leads a process group that the filter lets no descendant leave. One signal to the group
    meets all of them, including those that are being forked: a fork bomb would grow faster than its processes could be
    killed one by one.

    first_pid: the first process of the tree, the only child that this process has forked itself.
    """
    own_group = os.getpgrp()
    known = [first_pid]  # for kernels that do not list the children of a process
    while True:
        children, known = _children(os.getpid()) or known, []  # after its end, its number may belong to another
        # A child of the first process may lead the group. After the first one's end, its leftovers are our children.
        for pid in [*(below for child in children for below in _children(child)), *children]:
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                if group == own_group:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
        try:
            # An orphan becomes our child when its parent ends, so look again after every end.
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children_file(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}/children")


def _children(pid: int) -> list[int]:
    """Return the processes that the first thread of a process has forked or adopted."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in _children_file(pid).read_text("ascii").split()]
    return []
