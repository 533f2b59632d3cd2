"""What is kept of every attempt at a question, in a form that a kill at any moment leaves usable.

Attempts are appended to a journal (JSON lines) as they end, and before them answers that wait for the verdict of a
judge; a torn last line is cut off by whoever goes on. When all are there, `records.parquet` holds a row an attempt.
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from arpo_megatron.utils.atomic import atomic_write
from arpo_megatron.utils.text import whole_characters

_ANSWER = "to_judge"
"""Of a line of the journal that holds no attempt yet, but the answer that the judge is asked about."""
_MOST = 2**31 - 1
"""That a column of counts holds."""


class Outcome(StrEnum):
    """What became of an attempt; the first three are answers, the others failures by kind."""

    RIGHT = "right"
    PARTIAL = "partial"  # some tokens of the right answer (token F1)
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # ended without an answer that can be found, or breaks the format where that counts
    LENGTH = "length"  # cut by the token limit before an answer
    CALL_LIMIT = "call_limit"  # asked for a tool after the last allowed call
    MALFORMED = "malformed"  # a closing tool tag without a usable call before it
    PROMPT_TOO_LONG = "prompt_too_long"
    REFUSED = "refused"  # the server does not accept the request
    ENGINE = "engine"  # engine or server did not answer
    TOOLS = "tools"  # the tool service did not
    UNJUDGED = "unjudged"  # answered, but the judge could not be asked


TRANSIENT = frozenset({Outcome.ENGINE, Outcome.TOOLS, Outcome.UNJUDGED})
"""Not the model's fault and maybe over by now: asked again when an evaluation goes on; until then they are wrong."""
UNANSWERED = TRANSIENT | {Outcome.PROMPT_TOO_LONG, Outcome.REFUSED}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer to one question, scored.

    Attributes:
        benchmark: name, "held_out" for the held-out tasks of a run.
        question_id: unique within the benchmark.
        attempt: counts from 0.
        question: its text.
        expected: accepted answers.
        answer: what the model answers; None: nothing that can be found.
        score: in [0, 1]; what pass@k is computed from.
        correct: whether it counts as right as a whole (exact match, for token F1).
        format_ok: whether the response keeps to the format it was asked for.
        outcome: right, wrong, or the kind of failure.
        detail: more about a failure.
        tool_calls: made and answered.
        tool_errors: those of them whose tool did not answer "ok".
        model_tokens: sampled.
        tool_tokens: of tool results.
        seconds: until the attempt ended, wall time; of a checkpoint's attempts, until the last one at the question did.
        response: the text after the prompt, tool results included.
    """

    benchmark: str
    question_id: str
    attempt: int
    question: str
    expected: tuple[str, ...]
    answer: str | None
    score: float
    correct: bool
    format_ok: bool
    outcome: Outcome
    detail: str
    tool_calls: int
    tool_errors: int
    model_tokens: int
    tool_tokens: int
    seconds: float
    response: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells attempts apart."""
        return self.benchmark, self.question_id, self.attempt


class Journal:
    """The attempts of an evaluation, in a file that grows. May be called from any thread.

    Args:
        path: of the file; what an earlier process has left there is read, the last word on each attempt.
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
                    self._keep(_attempt(row))
            with path.open("r+b") as file:
                file.truncate(len(whole))
        self._file = path.open("a", encoding="utf-8")

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Keep attempts: they are in the hands of the operating system when this returns."""
        attempts = list(attempts)
        lines = "".join(json.dumps(asdict(attempt)) + "\n" for attempt in attempts)
        with self._lock:
            self._file.write(lines)
            self._file.flush()
            for attempt in attempts:
                self._keep(attempt)

    def keep_answers(self, benchmark: str, question_id: str, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep what is still to be judged: JSON-safe, by the attempt's number; as safe as an attempt is."""
        where = {"benchmark": benchmark, "question_id": question_id}
        lines = "".join(
            json.dumps({**where, "attempt": number, _ANSWER: answer}) + "\n" for number, answer in answers.items()
        )
        with self._lock:
            self._file.write(lines)
            self._file.flush()

    def answer(self, benchmark: str, question_id: str, attempt: int) -> Mapping[str, Any] | None:
        """What an earlier process has kept by `keep_answers`."""
        return self._answers.get((benchmark, question_id, attempt))

    def done(self, benchmark: str, question_id: str, attempt: int) -> bool:
        """Whether this attempt need not be made any more."""
        found = self._attempts.get((benchmark, question_id, attempt))
        return found is not None and found.outcome not in TRANSIENT

    def attempts(self) -> list[Attempt]:
        """All of them, in an order that does not depend on which ended first."""
        with self._lock:
            return [self._attempts[key] for key in sorted(self._attempts)]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, attempt: Attempt) -> None:
        self._attempts[attempt.key] = attempt


def write_records(path: Path, attempts: Sequence[Attempt]) -> None:
    """Write `records.parquet`: a row an attempt, columns as in `Attempt`; whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "int": pa.int32(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "tuple[str, ...]": pa.list_(pa.string()),
    }
    # The annotations are text or types; both are written the same way here.
    names = {field.name: getattr(field.type, "__name__", str(field.type)) for field in fields(Attempt)}
    names["expected"] = "tuple[str, ...]"
    schema = pa.schema({name: kinds.get(kind, pa.string()) for name, kind in names.items()})
    table = pa.Table.from_pylist([asdict(each) for each in attempts], schema=schema)
    with atomic_write(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def _attempt(row: dict[str, Any]) -> Attempt:
    """Earlier versions wrote what a server said as it was: halves of characters, counts that no file holds."""
    row = {name: whole_characters(value) if isinstance(value, str) else value for name, value in row.items()}
    row |= {name: row[name] if 0 <= row[name] <= _MOST else 0 for name in ("model_tokens", "tool_tokens")}
    row["expected"] = tuple(map(whole_characters, row["expected"]))
    row["outcome"] = Outcome(row["outcome"])
    return Attempt(**row)
