"""Run a function of a test module on several ranks of this machine.

Ranks are forked from a server process that has imported torch and Megatron once, so starting one takes milliseconds
instead of the ten seconds of those imports. Every call gets new processes: no state of an earlier test is left in them.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from unittest.mock import patch

from arpo_megatron.hardware.transformer_engine import EMULATION_VARIABLE
from arpo_megatron.utils.processes import STORE_FILE

ANY_ORDER_VARIABLE = "ARPO_TESTS_ANY_ORDER"
"""Environment variable that `pytest --any-order` sets for its workers."""
_PRELOADED = (
    *("pytest", "tests.any_order", "tests.actor.proof", "tests.actor.campaign", "tests.weights.roundtrip"),
    "transformers.models.auto.configuration_auto",  # `ModelSpec.from_hf` imports it late, which takes seconds a rank
)
_context: Any = get_context("forkserver")
_context.set_forkserver_preload(list(_PRELOADED))


class RankFailedError(AssertionError):
    """A rank did not end well; the message holds what the first such rank printed."""

    exit_code: int | None
    """Exit code as in `multiprocessing.Process`: negative for a signal, None for a rank that was still running."""

    def __init__(self, rank: int, exit_code: int | None, output: str) -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}:\n{output[-4000:]}")
        self.exit_code = exit_code


def run_ranks(
    function: Callable[..., None],
    *arguments: Any,
    ranks: int,
    timeout_s: float = 500.0,
    any_order: bool | None = None,
) -> None:
    """Call `function(*arguments)` on every rank and return when all have returned.

    Args:
        function: of a module that the ranks can import; it sets up and leaves the process group.
        arguments: can be pickled.
        ranks: processes on this machine.
        timeout_s: when it has passed, all ranks are killed.
        any_order: add in random order (tests/any_order.py); None: if `pytest --any-order` runs.

    Raises:
        RankFailedError: a rank raised, was killed or took too long. The other ranks are killed.
    """
    shuffled = ANY_ORDER_VARIABLE in os.environ if any_order is None else any_order
    with TemporaryDirectory() as logs:
        outputs = [Path(logs) / str(rank) for rank in range(ranks)]
        processes = [
            _context.Process(
                target=_run, args=(function, arguments, rank, ranks, Path(logs) / "store", outputs[rank], shuffled)
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            failed = _first_failure(processes, monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failed is not None:
            rank, exit_code = failed
            raise RankFailedError(rank, exit_code, outputs[rank].read_text(errors="replace"))


@contextmanager
def emulated_ranks() -> Iterator[Callable[..., None]]:
    """Yield `run_ranks` for functions of tests.actor.emulated, by name, on ranks with Transformer Engine's layers.

    Megatron decides on import whether it has them, so these ranks are forked from another process than the others, and
    this process does not import the module.
    """
    ours, theirs = Pipe()
    server = get_context("spawn").Process(target=_serve_emulated, args=(theirs,), daemon=False)
    with patch.dict(os.environ, {EMULATION_VARIABLE: "1"}):
        server.start()
    theirs.close()

    def run(function: str, *arguments: Any, ranks: int, timeout_s: float = 500.0) -> None:
        ours.send((function, arguments, ranks, timeout_s))
        if (failure := ours.recv()) is not None:
            raise failure

    try:
        yield run
    finally:
        ours.close()
        server.join()


def _serve_emulated(requests: Any) -> None:
    """Run functions on forked ranks until the other end closes."""
    global _context  # noqa: PLW0603  (this process forks its own ranks)
    emulated = import_module("tests.actor.emulated")
    _context = get_context("fork")
    while True:
        try:
            name, arguments, ranks, timeout_s = requests.recv()
        except EOFError:
            return
        try:
            run_ranks(getattr(emulated, name), *arguments, ranks=ranks, timeout_s=timeout_s)
        except RankFailedError as failure:
            requests.send(AssertionError(str(failure)))
        else:
            requests.send(None)


def _first_failure(processes: Sequence[Any], deadline: float) -> tuple[int, int | None] | None:
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), max(0.0, deadline - monotonic()))
        if not ended:
            return min(running.values()), None
        failed = []
        for rank in [running.pop(sentinel) for sentinel in ended]:
            processes[rank].join()
            if processes[rank].exitcode:
                failed.append((processes[rank].exitcode, rank))
        if failed:
            exit_code, rank = min(failed)  # a signal's is negative: the peers of a killed rank fail after it
            return rank, exit_code
    return None


def _run(
    function: Callable[..., None],
    arguments: Sequence[Any],
    rank: int,
    ranks: int,
    store: Path,
    output: Path,
    shuffled: bool,
) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE_FILE: str(store),
    }
    import torch

    gc.freeze()  # otherwise every collection copies the memory pages shared with the server process
    torch.set_num_threads(1)
    from tests.any_order import any_order

    try:
        with any_order() if shuffled else nullcontext():
            function(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # clean-up would wait for ranks that wait for this one
