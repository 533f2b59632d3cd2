"""The process that calls are forked from: imports what calls will need once, then forks a supervisor for each.

It is a fresh Python with an empty environment, so a call can find nothing of the service in its memory, and it does
so little that a call can cost it nothing: it never reads a request.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path

from tools_sandbox.python_tool import isolation as walls_of
from tools_sandbox.python_tool.call_supervisor import supervise
from tools_sandbox.python_tool.isolation import Isolation
from tools_sandbox.python_tool.protocol import PLACE
from tools_sandbox.python_tool.walls import WorkerLimits
from tools_sandbox.utils import linux


def main(control: socket.socket, root: str, preload: list[str], limits: dict[str, int]) -> None:
    """Say over the control socket which walls stand (one JSON message), then fork for every connection that comes.

    root: empty directory for working directories, removed at the end. preload: see `PythonConfig`. limits: fields of
    the `WorkerLimits` of the calls. Returns when the service closes its end of the control socket, also by dying.
    """
    linux.name_process("python-zygote")
    # Opened now: later on this process may not see the machine's folders.
    above = os.open(Path(root).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    isolation = None
    try:
        # What a call's view of the file system is built from must be open to the call's user.
        os.umask(0o022)
        isolation = walls_of.prepare(root, call_limits := WorkerLimits(**limits))
        for name in preload:
            importlib.import_module(name)
    except Exception as error:
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    else:
        control.sendall(json.dumps({"walls": asdict(isolation.walls), "threads": _threads()}).encode())
        _serve(control, isolation, call_limits, root)
    finally:
        # Returns (with an error) when the last supervisor has ended its call, which the service's end told it to.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        with contextlib.suppress(OSError):
            os.rmdir(Path(root).name, dir_fd=above)
        if isolation is not None and isolation.groups is not None:
            isolation.groups.remove()


def _threads() -> int:
    """Threads of this process. A module that starts some when it is imported would be forked without them."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _serve(control: socket.socket, isolation: Isolation, limits: WorkerLimits, root: str) -> None:
    # Nobody waits for supervisors: the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Collections in a child would otherwise touch, and so copy, every page of what was preloaded.
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, PLACE.size, 1)
        if not message:
            return
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: this call fails, the next one may not
            print(f"tools_sandbox: cannot fork: {error}", file=sys.stderr, flush=True)
            pid = -1
        if pid == 0:
            code = 1
            try:
                control.close()
                (place,) = PLACE.unpack(message)
                supervise(socket.socket(fileno=descriptors[0]), isolation, limits, root=root, place=place)
                code = 0
            except BaseException as error:
                print(f"tools_sandbox: supervisor failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
