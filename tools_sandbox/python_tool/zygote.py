"""The zygote, the process that calls are forked from: it preloads modules, then forks a supervisor for each call.

It is a fresh Python process with an empty environment, so a call finds nothing of the service in its memory. It never
reads a request, so no call can harm it.
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

from tools_sandbox.python_tool.call_supervisor import supervise
from tools_sandbox.python_tool.isolation import Isolation, prepare
from tools_sandbox.python_tool.protocol import SLOT
from tools_sandbox.python_tool.walls import WorkerLimits
from tools_sandbox.utils import linux


def main(control: socket.socket, root: str, preload: tuple[list[str], list[str]], limits: dict[str, int]) -> None:
    """Report over the control socket which walls stand (one JSON message), then fork for every connection that arrives.

    root: empty directory for working directories, removed at the end. preload: modules of the service, then those of
    `PythonConfig.preload`. limits: fields of the `WorkerLimits` of the calls. Returns when the service has closed its
    end of the control socket, or has died.
    """
    linux.name_process("python-zygote")
    # Init and supervisors inherit it. Otherwise a call that can signal them could make its own run look like a failure
    # of the sandbox, which is repeated.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Opened now, since this process may lose its view of the machine's folders.
    parent_folder = os.open(Path(root).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    isolation = None
    try:
        # The call's user must be able to read the files that its view is built from.
        os.umask(0o022)
        own_modules, modules = preload
        for name in own_modules:  # while the service's files are visible
            importlib.import_module(name)
        isolation = prepare(root, call_limits := WorkerLimits(**limits))
        for name in modules:
            importlib.import_module(name)
    except Exception as error:
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    else:
        control.sendall(json.dumps({"walls": asdict(isolation.walls), "threads": _count_threads()}).encode())
        _serve(control, isolation, call_limits, root)
    finally:
        # Returns (with an error) when the last supervisor has ended: the end of the service ends them.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        with contextlib.suppress(OSError):
            os.rmdir(Path(root).name, dir_fd=parent_folder)
        if isolation is not None and isolation.groups is not None:
            isolation.groups.remove()


def _count_threads() -> int:
    """Return the number of threads of this process. Forked processes lack threads that a preloaded module starts."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _serve(control: socket.socket, isolation: Isolation, limits: WorkerLimits, root: str) -> None:
    # The kernel reaps the supervisors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Otherwise collections in a child would touch, and so copy, every page of the preloaded modules.
    gc.collect()
    gc.freeze()
    # A fork copies one entry for each huge page that the child does not write to, instead of 512.
    linux.collapse_into_huge_pages()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, SLOT.size, 1)
        if not message:
            return
        try:
            pid = os.fork()
        except OSError as error:  # no processes or memory left: only this call fails
            print(f"tools_sandbox: cannot fork: {error}", file=sys.stderr, flush=True)
            pid = -1
        if pid == 0:
            code = 1
            try:
                control.close()
                (slot,) = SLOT.unpack(message)
                supervise(socket.socket(fileno=descriptors[0]), isolation, limits, root=root, slot=slot)
                code = 0
            except BaseException as error:
                print(f"tools_sandbox: supervisor failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
