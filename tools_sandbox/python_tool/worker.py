"""The process that runs foreign code, and the process above it that is the first of the call's tree."""

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
from typing import NamedTuple

from tools_sandbox.python_tool import isolation as walls_of
from tools_sandbox.python_tool import state as states
from tools_sandbox.python_tool.isolation import Isolation
from tools_sandbox.python_tool.protocol import THREAD_VARIABLES, Request, read_exactly, read_head
from tools_sandbox.python_tool.walls import WorkerLimits

FILENAME = "<python>"
"""The name of the code in its own tracebacks."""
_STATE_DESCRIPTOR = 3
_REQUEST_DESCRIPTOR = 4


class Ends(NamedTuple):
    """The ends of a call's pipes that its tree has: all for writing but the last."""

    out: int
    err: int
    status: int
    """Gets the worker's wait status as a decimal number, or "!" and a message if the walls could not be raised."""
    state: int
    """Gets the state of a session; see `state.save`."""
    request: int
    """Brings the worker its `Request`, when there is one."""


def run_init(isolation: Isolation, limits: WorkerLimits, *, folder: str, uid: int, ends: Ends) -> None:
    """Be the first process of the call's tree: fork the worker, report its end, never return."""
    try:
        walls_of.enter_init(isolation, limits, folder)
        pid = os.fork()
        if pid == 0:
            _run_worker(isolation, limits, uid, ends)
        for descriptor in (ends.out, ends.err, ends.state, ends.request):
            os.close(descriptor)
        while True:  # the tree's orphans come here too
            ended, code = os.waitpid(-1, 0)
            if ended == pid:
                os.write(ends.status, str(code).encode())
                break
    except BaseException as error:
        os.write(ends.status, f"!{error!r}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(0)


def _run_worker(isolation: Isolation, limits: WorkerLimits, uid: int, ends: Ends) -> None:
    """Raise the walls, wait for the request behind them, run its code, never return."""
    code = 1
    try:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            # Above the numbers they will have, so that none is overwritten before it is copied.
            inside = (nothing, ends.out, ends.err, ends.state, ends.request)
            sources = [fcntl.fcntl(end, fcntl.F_DUPFD, 16) for end in inside]
            ends = ends._replace(status=fcntl.fcntl(ends.status, fcntl.F_DUPFD, 16))
            for target, source in enumerate(sources):
                os.dup2(source, target)
            preloaded_bytes = walls_of.enter_worker(isolation, limits, uid)
        except BaseException as error:
            os.write(ends.status, f"!{error!r}\n".encode(errors="backslashreplace"))
            return
        os.closerange(_REQUEST_DESCRIPTOR + 1, 1 << 20)
        _fresh_interpreter_state()
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        worker = os.getpid()
        found = read_head(_read_request)
        if found is None:  # the supervisor is gone
            return
        head, state_bytes = found
        request = Request.decode(head, read_exactly(_read_request, state_bytes))
        os.close(_REQUEST_DESCRIPTOR)
        walls_of.bound_memory(limits, preloaded_bytes + state_bytes)
        if not request.state_mb:
            os.close(_STATE_DESCRIPTOR)
        code = _run(request, limits, main)
        # A full pipe or a closed stdout is the code's own doing, and its result all the same.
        sys.stdout.flush()
        sys.stderr.flush()
        if request.state_mb and os.getpid() == worker:  # not a process that the code has forked and that comes here too
            states.save(vars(main), _STATE_DESCRIPTOR, request.state_mb)
            sys.stdout.flush()
    finally:
        os._exit(code)


def _read_request(size: int) -> bytes:
    return os.read(_REQUEST_DESCRIPTOR, size)


def _fresh_interpreter_state() -> None:
    """Undo what a fork inherits and a new Python would not have."""
    os.environ.clear()
    for name in THREAD_VARIABLES:
        # For C libraries alone: os.environ stays empty.
        os.putenv(name, "1")
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As a Python would choose that starts where there is no epoll.
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment, misc]  # typed as one class
    if "numpy.random" in sys.modules:
        # Preloaded once, its global generator would draw the same numbers in every call.
        sys.modules["numpy.random"].seed()
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    # By lines, so that what was printed before a time limit is not lost in a buffer.
    sys.stdout = io.TextIOWrapper(open(1, "wb"), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb"), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = [""]
    sys.path.insert(0, "")


def _run(request: Request, limits: WorkerLimits, main: types.ModuleType) -> int:
    """Run code as a notebook cell would; returns the exit code and leaves a trimmed traceback on stderr."""
    code = request.code
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    try:
        if request.state:
            states.load(request.state, vars(main))
        # dont_inherit: the __future__ imports of this module are not the code's.
        tree = ast.parse(code, FILENAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - what this process is for
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), FILENAME, "eval", dont_inherit=True)
            value = eval(expression, main.__dict__)  # noqa: S307
            if value is not None:
                print(value)
        _finish()
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except BaseException as error:
        walls_of.release_memory_reserve()
        sys.stdout.flush()
        print(_trimmed_traceback(error), end="", file=sys.stderr)
        if isinstance(error, MemoryError):
            print(f"(The memory limit is {limits.memory_mb} MiB.)", file=sys.stderr)
    return 1


def _finish() -> None:
    """End as Python does: wait for threads that the code started (also idle ones of pools), run exit functions.

    What fails here is told on stderr and is no failure of the code: a process pool that closes itself while it is told
    to close meets a closed pipe now and then.
    """
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException:
            traceback.print_exc()
    atexit._run_exitfuncs()


def _trimmed_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, with the frames of the code itself only."""
    try:
        report = traceback.TracebackException.from_exception(error)
        for part in _parts(report):
            part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if frame.filename == FILENAME])
        return "".join(report.format())
    except BaseException:  # an exception whose own __str__ raises, a recursion limit reached again
        return f"{type(error).__name__}\n"


def _parts(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The exception, those that caused it and those of a group, each once."""
    waiting, seen = [report], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            linked = (part.__cause__, part.__context__, *(part.exceptions or ()))
            waiting.extend(other for other in linked if other is not None)
