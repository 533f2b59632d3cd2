"""What a check answers: ok, a warning or a failure, each with how to fix it."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.errors import UserError

CHECK_S = 25.0
CHECKS_S = 40.0
Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the doctor.

    Attributes:
        name: of the check.
        level: a failure ends the job before it begins.
        text: what was found.
        fix: what to do about it; "" for ok.
    """

    name: str
    level: Level
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name:12} {self.text}{f': {self.fix}' if self.fix else ''}"


def ok(name: str, text: str) -> CheckResult:
    """All is well."""
    return CheckResult(name, "ok", text)


def warning(name: str, text: str, fix: str) -> CheckResult:
    """The job can run, but not as it might."""
    return CheckResult(name, "warning", text, fix)


def failure(name: str, text: str, fix: str = "") -> CheckResult:
    """The job cannot run."""
    return CheckResult(name, "failure", text, fix)


def run_checks(
    checks: Iterable[tuple[str, Callable[[], CheckResult]]], each_s: float = CHECK_S, all_s: float = CHECKS_S
) -> list[CheckResult]:
    """Every check's answer, in order; what a check itself cannot do is its failure, and so is no answer in time.

    Args:
        checks: by name.
        each_s: seconds that one may take.
        all_s: seconds that all together may take; when they are over, each that follows still has one.
    """
    end = time.monotonic() + all_s
    return [_answer(name, check, max(1.0, min(each_s, end - time.monotonic()))) for name, check in checks]


def _answer(name: str, check: Callable[[], CheckResult], within_s: float) -> CheckResult:
    """In a thread of its own, which is left behind where it hangs: nothing else ends a call to a dead filesystem."""
    found: list[CheckResult] = []
    thread = threading.Thread(target=lambda: found.append(_tried(name, check)), daemon=True, name=f"check {name}")
    thread.start()
    thread.join(within_s)
    return (
        found[0] if found else failure(name, f"no answer for {within_s:.0f} s", "a filesystem, device or service hangs")
    )


def _tried(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except UserError as error:
        return failure(name, str(error))
    except Exception as error:
        return failure(name, f"the check failed: {type(error).__name__}: {error}", "fix that first")


def show(findings: Iterable[CheckResult], where: str = "") -> bool:
    """Print one line each on standard output; whether none of them is a failure."""
    sound = True
    for finding in findings:
        print(f"{where}{finding}", flush=True)
        sound &= finding.level != "failure"
    sys.stdout.flush()
    return sound
