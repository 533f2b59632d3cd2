"""The worker, which runs foreign code, and the init process above it, the first of the call's tree."""

from __future__ import annotations

import ast
import atexit
import fcntl
import io
import linecache
import os
import selectors
import signal
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools_sandbox.python_tool import fork_hooks
from tools_sandbox.python_tool.isolation import (
    Isolation,
    bound_memory,
    enter_init,
    enter_worker,
    release_memory_reserve,
)
from tools_sandbox.python_tool.protocol import THREAD_VARIABLES, Request, read_exactly, read_head
from tools_sandbox.python_tool.state import load_state, save_state
from tools_sandbox.python_tool.walls import WorkerLimits

FILENAME = "<python>"
"""File name of the code in its tracebacks."""
ALONE = "."
_STATE_DESCRIPTOR = 3
_REQUEST_DESCRIPTOR = 4


class Ends(NamedTuple):
    """One side of the pipes of a call. The processes of the call write to all of them but the last, which they read."""

    out: int
    err: int
    status: int
    """Receives the worker's wait status as a decimal number, with `ALONE` after it if that was the last process of the
    code, or "!" and a message if the walls could not be raised."""
    state: int
    """Receives the state of a session; see `state.save_state`."""
    request: int
    """Carries the `Request` to the worker once it has arrived."""


def run_init(isolation: Isolation, limits: WorkerLimits, *, folder: str, uid: int, ends: Ends) -> None:
    """Act as the first process of the call's tree: fork the worker and report its end. Does not return."""
    try:
        enter_init(isolation, limits, folder)
        pid = os.fork()
        if pid == 0:
            _run_worker(isolation, limits, uid, ends)
        for descriptor in (ends.out, ends.err, ends.state, ends.request):
            os.close(descriptor)
        while True:  # orphans of the tree are reaped here too
            ended, code = os.waitpid(-1, 0)
            if ended == pid:
                os.write(ends.status, f"{code}{ALONE if _is_alone() else ''}".encode())
                break
    except BaseException as error:
        os.write(ends.status, f"!{error!r}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(0)


def _is_alone() -> bool:
    """Return whether this process is the last one of its PID namespace, where it adopts every orphan."""
    if os.getpid() != 1:
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _run_worker(isolation: Isolation, limits: WorkerLimits, uid: int, ends: Ends) -> None:
    """Raise the walls, wait inside for the request, and run its code. Does not return."""
    code = 1
    try:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            # Copied above their final numbers first, so that none is overwritten before it is moved.
            inside = (nothing, ends.out, ends.err, ends.state, ends.request)
            sources = [fcntl.fcntl(end, fcntl.F_DUPFD, 16) for end in inside]
            ends = ends._replace(status=fcntl.fcntl(ends.status, fcntl.F_DUPFD, 16))
            for target, source in enumerate(sources):
                os.dup2(source, target)
            preloaded_bytes = enter_worker(isolation, limits, uid)
        except BaseException as error:
            os.write(ends.status, f"!{error!r}\n".encode(errors="backslashreplace"))
            return
        os.closerange(_REQUEST_DESCRIPTOR + 1, 1 << 20)
        _reset_interpreter()
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        worker = os.getpid()
        found = read_head(_read_request)
        if found is None:  # the supervisor has gone
            return
        head, state_bytes = found
        request, state = Request.decode(head), read_exactly(_read_request, state_bytes)
        os.close(_REQUEST_DESCRIPTOR)
        bound_memory(limits, preloaded_bytes + state_bytes)
        if not request.state_mib:
            os.close(_STATE_DESCRIPTOR)
        folder = Path.cwd()
        code = _run(request.code, state, limits, main)
        # A full pipe or a closed stdout is the code's own doing, so errors here are its result.
        sys.stdout.flush()
        sys.stderr.flush()
        if request.state_mib and os.getpid() == worker:  # a process that the code has forked may also get here
            save_state(vars(main), folder, _STATE_DESCRIPTOR, request.state_mib)
            sys.stdout.flush()
    finally:
        os._exit(code)


def _read_request(size: int) -> bytes:
    return os.read(_REQUEST_DESCRIPTOR, size)


def _reset_interpreter() -> None:
    """Undo what a fork inherits and a new Python process would not have."""
    fork_hooks.run_deferred()
    os.environ.clear()
    for name in THREAD_VARIABLES:
        # For C libraries only: os.environ stays empty.
        os.putenv(name, "1")
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The choice of a Python that starts without epoll.
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment, misc]  # typed as one class
    for name in ("numpy.random", "sympy.core.random"):
        if name in sys.modules:
            # Otherwise the global generator of a preloaded module would draw the same numbers in every call.
            sys.modules[name].seed()
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    # Line-buffered, so that printed lines are not lost at a time limit.
    sys.stdout = io.TextIOWrapper(open(1, "wb"), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb"), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = [""]
    sys.path.insert(0, "")


def _run(code: str, state: bytearray, limits: WorkerLimits, main: types.ModuleType) -> int:
    """Run code like a notebook cell, after it loads its state (empty: none).

    Return the exit code, and leave a trimmed traceback on stderr.
    """
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    try:
        if state:
            load_state(state, vars(main))
        # dont_inherit: the __future__ imports of this module must not apply to the code.
        tree = ast.parse(code, FILENAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the purpose of the tool
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), FILENAME, "eval", dont_inherit=True)
            value = eval(expression, main.__dict__)  # noqa: S307
            if value is not None:
                print(value)
        _shut_down_interpreter()
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except BaseException as error:
        release_memory_reserve()
        sys.stdout.flush()
        print(_trimmed_traceback(error), end="", file=sys.stderr)
        if isinstance(error, MemoryError):
            print(f"(The memory limit is {limits.memory_mib} MiB.)", file=sys.stderr)
    return 1


def _shut_down_interpreter() -> None:
    """Wait for the code's threads (including idle ones of pools) and run exit functions, as Python does.

    A failure here is printed to stderr and is not a failure of the code: a process pool that is closed twice sometimes
    meets a closed pipe.
    """
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException:
            traceback.print_exc()
    atexit._run_exitfuncs()


def _trimmed_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, with only the frames of the code."""
    try:
        report = traceback.TracebackException.from_exception(error)
        for part in _chained_exceptions(report):
            part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if frame.filename == FILENAME])
        return "".join(report.format())
    except BaseException:  # for example an exception whose __str__ raises, or a recursion limit
        return f"{type(error).__name__}\n"


def _chained_exceptions(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the exception, its causes, and the members of groups, each once."""
    waiting, seen = [report], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            linked = (part.__cause__, part.__context__, *(part.exceptions or ()))
            waiting.extend(other for other in linked if other is not None)
