"""What a check answers: ok, a warning or a failure, each with how to mend it."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.errors import UserError

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: of the check.
        level: a failure ends the job before it begins.
        text: what was found.
        mend: what to do about it; "" for ok.
    """

    name: str
    level: Level
    text: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name:12} {self.text}{f': {self.mend}' if self.mend else ''}"


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", text)


def warning(name: str, text: str, mend: str) -> Finding:
    """The job can run, but not as it might."""
    return Finding(name, "warning", text, mend)


def failure(name: str, text: str, mend: str = "") -> Finding:
    """The job cannot run."""
    return Finding(name, "failure", text, mend)


def run_checks(checks: Iterable[tuple[str, Callable[[], Finding]]]) -> list[Finding]:
    """Every check's answer, in order; what a check itself cannot do is its failure."""
    found = []
    for name, check in checks:
        try:
            found.append(check())
        except UserError as error:
            found.append(failure(name, str(error)))
        except Exception as error:
            found.append(failure(name, f"the check failed: {type(error).__name__}: {error}", "mend that first"))
    return found


def show(findings: Iterable[Finding], where: str = "") -> bool:
    """Print one line each on standard output; whether none of them is a failure."""
    sound = True
    for finding in findings:
        print(f"{where}{finding}", flush=True)
        sound &= finding.level != "failure"
    sys.stdout.flush()
    return sound
