"""The journal of an evaluation: every attempt, in a file that a kill at any moment leaves usable.

Attempts are appended as JSON lines as they finish. Answers that wait for a judge are appended before their verdict.
A torn last line is cut off when an evaluation resumes. At the end, `records.parquet` has one row per attempt.
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from arpo_megatron.utils.atomic import atomic_write

_ANSWER = "to_judge"
"""Key of a line with an unjudged answer."""


class Outcome(StrEnum):
    """Outcome of an attempt: the first three are answers, the others failures."""

    RIGHT = "right"
    PARTIAL = "partial"  # some tokens of the right answer (token F1)
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no answer was found, or it breaks a required format
    LENGTH = "length"  # cut by the token limit before an answer
    CALL_LIMIT = "call_limit"  # a tool call beyond the limit
    MALFORMED = "malformed"  # a closing tool tag without a valid call
    PROMPT_TOO_LONG = "prompt_too_long"
    REFUSED = "refused"  # the server rejected the request
    ENGINE = "engine"  # the engine or server did not answer
    TOOLS = "tools"  # the tool service did not answer
    UNJUDGED = "unjudged"  # answered, but the judge did not answer


TRANSIENT = frozenset({Outcome.ENGINE, Outcome.TOOLS, Outcome.UNJUDGED})
"""Failures of services: the attempt counts as wrong, and is repeated when the evaluation resumes."""
UNANSWERED = TRANSIENT | {Outcome.PROMPT_TOO_LONG, Outcome.REFUSED}
"""Outcomes without a scored response."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A scored answer to a question."""

    benchmark: str
    """Name of the benchmark; "held_out" for the held-out tasks of a run."""
    question_id: str
    """Unique within the benchmark."""
    attempt: int
    """Number of the attempt, from 0."""
    question: str
    expected: tuple[str, ...]
    """Accepted answers."""
    answer: str | None
    """The model's answer; None if none was found."""
    score: float
    """Score in [0, 1], the input of pass@k."""
    correct: bool
    """Whether the answer is correct as a whole: for token F1, an exact match."""
    format_ok: bool
    """Whether the response has the requested format."""
    outcome: Outcome
    detail: str
    """Details of a failure."""
    tool_calls: int
    """Calls that were answered."""
    tool_errors: int
    """Calls whose status is not "ok"."""
    model_tokens: int
    tool_tokens: int
    """Tokens of tool results."""
    seconds: float
    """Wall time of the attempt; for a checkpoint, of all attempts at the question."""
    response: str
    """Text after the prompt, with tool results."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Benchmark, question and number, which identify the attempt."""
        return self.benchmark, self.question_id, self.attempt


class Journal:
    """The attempts of an evaluation, in a file that grows. Thread-safe.

    Args:
        path: the file. Attempts of an earlier process are read; the last line of each attempt counts.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[tuple[str, str, int], Attempt] = {}
        self._answers: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = json.loads(line)
                if _ANSWER in row:
                    self._answers[row["benchmark"], row["question_id"], row["attempt"]] = row[_ANSWER]
                else:
                    self._store(_attempt(row))
            with path.open("r+b") as file:
                file.truncate(len(whole))
        self._file = path.open("a", encoding="utf-8")

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Append attempts; the operating system has them when this returns."""
        attempts = list(attempts)
        lines = "".join(json.dumps(asdict(attempt)) + "\n" for attempt in attempts)
        with self._lock:
            self._file.write(lines)
            self._file.flush()
            for attempt in attempts:
                self._store(attempt)

    def save_answers(self, benchmark: str, question_id: str, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Append JSON-safe answers that wait for a judge, by attempt number."""
        key = {"benchmark": benchmark, "question_id": question_id}
        lines = "".join(
            json.dumps({**key, "attempt": number, _ANSWER: answer}) + "\n" for number, answer in answers.items()
        )
        with self._lock:
            self._file.write(lines)
            self._file.flush()

    def answer(self, benchmark: str, question_id: str, attempt: int) -> Mapping[str, Any] | None:
        """Return an answer that an earlier process saved with `save_answers`."""
        return self._answers.get((benchmark, question_id, attempt))

    def done(self, benchmark: str, question_id: str, attempt: int) -> bool:
        """Return whether the attempt is finished for good."""
        found = self._attempts.get((benchmark, question_id, attempt))
        return found is not None and found.outcome not in TRANSIENT

    def attempts(self) -> list[Attempt]:
        """Return all attempts in a fixed order."""
        with self._lock:
            return [self._attempts[key] for key in sorted(self._attempts)]

    def close(self) -> None:
        """Close the file, after which no attempt can be added."""
        self._file.close()

    def _store(self, attempt: Attempt) -> None:
        self._attempts[attempt.key] = attempt


def write_records(path: Path, attempts: Sequence[Attempt]) -> None:
    """Write `records.parquet` atomically: one row per attempt with the fields of `Attempt`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_write(path) as partial:
        pq.write_table(pa.Table.from_pylist([asdict(each) for each in attempts]), partial, compression="zstd")


def _attempt(row: dict[str, Any]) -> Attempt:
    return Attempt(**row | {"expected": tuple(row["expected"]), "outcome": Outcome(row["outcome"])})
