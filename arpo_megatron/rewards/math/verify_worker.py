"""The process that runs math-verify: `python -m arpo_megatron.rewards.math.verify_worker FD`.

It reads [answer, truth, seconds] from the connection at file descriptor FD, answers "equal", "different" or
"undecided", and ends when the other side closes. A question that takes more seconds of CPU time ends the process: the
default action of SIGPROF needs no Python. The limit is CPU time, so that a busy machine changes no verdict.
"""

import json
import logging
import re
import resource
import signal
import sys
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

_MEMORY_BYTES = 1 << 30
_OR = re.compile(r"\bor\b")
_DECIMAL = re.compile(r"[+-]?\d*(?:\.(\d*))?")


def main(fd: int) -> None:
    """Answer comparisons on the connection `fd` until the other end closes it."""
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
        found = _compare(answer, truth)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(json.dumps(found).encode())


def _compare(answer: str, truth: str) -> str:
    try:
        expected, given = _parse(truth), _parse(answer)
        if not _consistent(given, answer):
            return "different"
        if _verified(expected, given):
            return "equal"
        if (again := (_school_notation(expected), _school_notation(given))) != (expected, given) and _verified(*again):
            return "equal"
    except MemoryError:
        return "undecided"
    except Exception:  # sympy raises anything on odd input, recursion included: the answer cannot be read
        return "different"
    return "different"


def _parse(text: str) -> Any:
    r"""Parse the whole text; raise an error if that fails.

    `math_verify.parse` searches for a part that it can read: from `5 \lor 6` it takes 6, and it drops words as units.
    """
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    plain = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    is_union = bool(_OR.search(text))  # normalization turns "or" into a comma
    text = normalize_latex(text, config=plain)
    parsed = latex2sympy(
        text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
    )
    return _union(parsed) if is_union else parsed


def _union(parsed: Any) -> Any:
    """Return x < 1 or x > 2 as a union of intervals."""
    import sympy
    from math_verify.grader import is_equation, is_relation

    if isinstance(parsed, sympy.FiniteSet) and all(is_relation(part) and not is_equation(part) for part in parsed):
        return sympy.Union(*(part.as_set() for part in parsed))
    return parsed


def _consistent(given: Any, answer: str) -> bool:
    r"""Return False for 7 = 6 and 5 \approx 6: math-verify compares one end of a chain, so the numbers in it must be
    equal.

    The approximated side is compared. A number after the sign must equal it, with an error of at most one in its last
    digit.
    """
    import sympy
    from math_verify.grader import sympy_expr_eq

    if not isinstance(given, sympy.Basic):
        return True
    for sides in (equation.args for equation in given.atoms(sympy.Eq)):
        numbers = all(isinstance(side, sympy.Expr) and side.is_number for side in sides)
        if numbers and not sympy_expr_eq(*sides, float_rounding=6, numeric_precision=15):
            return False
    values = [part.split("=") for part in answer.split("\\approx")]
    for exact, rounded in pairwise(values):
        value = _parse(exact[-1])
        if value.free_symbols and len(values) == 2:
            continue  # x \approx 5 names the value
        decimals = _DECIMAL.fullmatch(rounded[0].strip())
        if not decimals or abs(value.evalf() - sympy.Float(decimals[0])) >= 10.0 ** -len(decimals[1] or ""):
            return False
    return True


def _verified(expected: Any, given: Any) -> bool:
    from math_verify import verify
    from sympy.logic.boolalg import Boolean

    if verify(expected, given, timeout_seconds=None):
        return _same_magnitude(expected, given)
    # math-verify reads an inequality as an interval only on the expected side.
    return isinstance(given, Boolean) and bool(verify(given, expected, timeout_seconds=None))


def _same_magnitude(expected: Any, given: Any) -> bool:
    """Return False for small numbers that are equal only because math-verify rounds to six decimals."""
    import sympy

    if not all(isinstance(part, sympy.Expr) and not part.free_symbols for part in (expected, given)):
        return True
    if not any(part.has(sympy.Float) for part in (expected, given)):
        return True
    small, other = sympy.N(expected), sympy.N(given)
    return not abs(small) < 1e-2 or bool(abs(small - other) <= 1e-4 * abs(small))


def _school_notation(parsed: Any) -> Any:
    """Return the expression with i as the imaginary unit and odd roots of negative numbers as the real ones."""
    import sympy

    def real_root(power: Any) -> Any:
        return -sympy.Pow(-power.base, power.exp)

    def odd_root(part: Any) -> bool:
        return bool(
            part.is_Pow and part.base.is_negative and part.exp.is_Rational and part.exp.p == 1 and part.exp.q % 2
        )

    if not isinstance(parsed, sympy.Expr):
        return parsed
    units = {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    found = parsed.subs(units).replace(odd_root, real_root)
    return parsed if found == parsed else sympy.simplify(found)


if __name__ == "__main__":
    main(int(sys.argv[1]))
