"""Find and read the files of benchmarks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import Benchmark
from arpo_megatron.utils.table_reader import FORMATS, BadRowError, read_rows


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a benchmark.

    Attributes:
        benchmark: its name.
        id: unique within it and stable: the row of the file.
        text: as it is asked.
        answers: any of them is right.
    """

    benchmark: str
    id: str
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TestSet:
    """What the file of a benchmark holds.

    Attributes:
        benchmark: whose it is.
        questions: in the file's order.
        left_out: rows that gave none, with the reason.
        path: the file.
        sha256: its digest.
    """

    __test__ = False  # pytest takes the name for one of its own

    benchmark: Benchmark
    questions: tuple[Question, ...]
    left_out: tuple[tuple[int, str], ...]
    path: Path
    sha256: str

    @property
    def known_file(self) -> bool:
        """Whether it is, byte for byte, one that the reader was tried on."""
        return self.sha256 in self.benchmark.sha256


def find(benchmark: Benchmark, directory: Path) -> Path | None:
    """The benchmark's file in a directory: NAME.jsonl, .json, .parquet or .csv, or the name it is published under."""
    stems = (benchmark.name, *benchmark.also)
    paths = (directory / f"{stem}{suffix}" for stem in stems for suffix in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def download_hint(benchmark: Benchmark, directory: Path) -> str:
    """The one line that says what to do about a missing file."""
    return (
        f"{benchmark.name}: no {directory / benchmark.name}.jsonl; get {benchmark.source} [{benchmark.licence}] and "
        f"put it there under this name ({', '.join(FORMATS)})"
    )


def read(benchmark: Benchmark, path: Path) -> TestSet:
    """Read a benchmark's file. Raises UserError where it is unreadable or holds no question."""
    content = path.read_bytes()
    questions, left_out = [], []
    for row in read_rows(path, content=content):
        value = row.needed()
        try:
            if not isinstance(value, dict):
                raise BadRowError("it is no object")
            text, answers = benchmark.question_of(value)
        except BadRowError as problem:
            left_out.append((row.number, str(problem)))
        else:
            questions.append(Question(benchmark.name, f"{benchmark.name}-{row.number}", text, answers))
    if not questions:
        first = f"; the first row: {left_out[0][1]}" if left_out else ""
        raise UserError(f"{path}: not one question of {benchmark.name} in {len(left_out)} rows{first}")
    return TestSet(benchmark, tuple(questions), tuple(left_out), path, hashlib.sha256(content).hexdigest())


def read_all(
    benchmarks: Sequence[Benchmark], directory: Path, *, skip_missing: bool
) -> tuple[list[TestSet], list[Benchmark]]:
    """The files of these benchmarks, and the benchmarks whose file is missing.

    Raises:
        UserError: a file is missing, and `skip_missing` does not allow it; or all are.
    """
    found, missing = [], []
    for benchmark in benchmarks:
        if (path := find(benchmark, directory)) is not None:
            found.append(read(benchmark, path))
        else:
            missing.append(benchmark)
    if missing and not (skip_missing and found):
        others = ", ".join(benchmark.name for benchmark in missing[1:])
        rest = f" (missing too: {others})" if others else ""
        hint = "; --skip-missing goes on without" if found else "; --data DIR says where the files are"
        raise UserError(download_hint(missing[0], directory) + rest + hint)
    return found, missing
