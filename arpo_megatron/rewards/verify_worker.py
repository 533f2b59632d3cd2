"""The process that runs math-verify: `python -m arpo_megatron.rewards.verify_worker FD TIMEOUT_S`.

Reads [answer, truth] from the connection at file descriptor FD, answers true or false, and ends when the other side
closes. A question that takes longer than TIMEOUT_S ends the process: the default action of SIGALRM needs no Python.
"""

import json
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection

_MEMORY_BYTES = 1 << 30


def main(fd: int, timeout_s: float) -> None:
    """Serve until the connection closes."""
    import math_verify  # noqa: F401  (before the memory limit and the first timer)

    logging.disable(logging.CRITICAL)  # math-verify reports every answer it cannot parse
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection = Connection(fd)
    connection.send_bytes(b"ready")
    while True:
        try:
            answer, truth = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        equal = _same(answer, truth)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send_bytes(json.dumps(equal).encode())


def _same(answer: str, truth: str) -> bool:
    from math_verify import parse, verify

    try:
        # The box makes math-verify read the whole text as one answer. Its own time limits are off: the timer is ours.
        expected, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        return bool(verify(expected, given, timeout_seconds=None))
    except Exception:  # sympy raises anything on odd input, out of memory and recursion included
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
