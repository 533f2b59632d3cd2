"""Results of checks: ok, a warning or a failure, and how to fix it."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.errors import UserError

CHECK_S, CHECKS_S = 25.0, 40.0
"""Time limits of one check, and of all checks of a node, whose other tasks wait for them."""
Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check, which is a line of `arpo doctor`."""

    name: str
    level: Level
    """A failure ends the job before it begins."""
    text: str
    fix: str = ""
    """How to fix it; "" for ok."""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name:12} {self.text}{f': {self.fix}' if self.fix else ''}"


def ok(name: str, text: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(name, "ok", text)


def warning(name: str, text: str, fix: str) -> CheckResult:
    """Return the result of a check that the job can run without."""
    return CheckResult(name, "warning", text, fix)


def failure(name: str, text: str, fix: str = "") -> CheckResult:
    """Return the result of a check without which the job cannot run."""
    return CheckResult(name, "failure", text, fix)


def run_checks(
    checks: Iterable[tuple[str, Callable[[], CheckResult]]], each_s: float = CHECK_S, all_s: float = CHECKS_S
) -> list[CheckResult]:
    """Return the results of all checks in order. A check that raises or takes too long has failed.

    Args:
        checks: names and functions.
        each_s: longest time of one check.
        all_s: longest time of all checks. After it each remaining check has one second.
    """
    end = time.monotonic() + all_s
    return [_answer(name, check, max(1.0, min(each_s, end - time.monotonic()))) for name, check in checks]


def _answer(name: str, check: Callable[[], CheckResult], within_s: float) -> CheckResult:
    """Run a check in a thread, which is abandoned if it hangs: a call to a dead filesystem cannot be ended."""
    found: list[CheckResult] = []
    thread = threading.Thread(target=lambda: found.append(_tried(name, check)), daemon=True, name=f"check {name}")
    thread.start()
    thread.join(within_s)
    if found:
        return found[0]
    return failure(name, f"no answer for {within_s:.0f} s", "check the filesystem, device or service that hangs")


def _tried(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except UserError as error:
        return failure(name, str(error))
    except Exception as error:
        return failure(name, f"the check failed: {type(error).__name__}: {error}", "fix that first")


def show(findings: Iterable[CheckResult], where: str = "") -> bool:
    """Print one line for each result; return whether none is a failure."""
    sound = True
    for finding in findings:
        print(f"{where}{finding}", flush=True)
        sound &= finding.level != "failure"
    sys.stdout.flush()
    return sound
