"""The process that runs math-verify: `python -m arpo_megatron.rewards.verify_worker FD`.

Reads [answer, truth, seconds] from the connection at file descriptor FD, answers "equal", "different" or "undecided",
and ends when the other side closes. A question that takes more seconds of CPU time ends the process: the default action
of SIGPROF needs no Python. (CPU time, so that a busy machine changes no verdict.)
"""

import json
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

_MEMORY_BYTES = 1 << 30


def main(fd: int) -> None:
    """Serve until the connection closes."""
    import math_verify  # noqa: F401  (before the memory limit and the first timer)

    logging.disable(logging.CRITICAL)  # math-verify reports every answer it cannot parse
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection = Connection(fd)
    connection.send_bytes(b"ready")
    while True:
        try:
            answer, truth, timeout_s = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        found = _compared(answer, truth)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(json.dumps(found).encode())


def _compared(answer: str, truth: str) -> str:
    from math_verify import parse

    try:
        # The box makes math-verify read the whole text as one answer. Its own time limits are off: the timer is ours.
        expected, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        if _verified(expected, given):
            return "equal"
        if (again := (_school(expected), _school(given))) != (expected, given) and _verified(*again):
            return "equal"
    except MemoryError:
        return "undecided"
    except Exception:  # sympy raises anything on odd input, recursion included: not an answer that can be read
        return "different"
    return "different"


def _verified(expected: list[Any], given: list[Any]) -> bool:
    from math_verify import verify
    from sympy.logic.boolalg import Boolean

    if verify(expected, given, timeout_seconds=None):
        return True
    # math-verify reads an inequality as the interval it describes only where it is what is expected.
    inequality = any(isinstance(part, Boolean) for part in given)
    return inequality and bool(verify(given, expected, timeout_seconds=None))


def _school(parsed: list[Any]) -> list[Any]:
    """What was parsed, with i as the imaginary unit and odd roots of negative numbers as the real ones."""
    import sympy

    def real_root(power: Any) -> Any:
        return -sympy.Pow(-power.base, power.exp)

    def odd_root(part: Any) -> bool:
        return bool(
            part.is_Pow and part.base.is_negative and part.exp.is_Rational and part.exp.p == 1 and part.exp.q % 2
        )

    def read(part: Any) -> Any:
        if not isinstance(part, sympy.Expr):
            return part
        units = {symbol: sympy.I for symbol in part.free_symbols if symbol.name == "i"}
        found = part.subs(units).replace(odd_root, real_root)
        return part if found == part else sympy.simplify(found)

    return [read(part) for part in parsed]


if __name__ == "__main__":
    main(int(sys.argv[1]))
