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
    """Text and accepted answers of one question of a benchmark."""

    benchmark: str
    """Name of the benchmark."""
    id: str
    """Unique and stable within the benchmark; it contains the row of the file."""
    text: str
    answers: tuple[str, ...]
    """Accepted answers."""


@dataclass(frozen=True, slots=True)
class TestSet:
    """The questions in a benchmark's file."""

    __test__ = False  # pytest would collect the class by its name

    benchmark: Benchmark
    questions: tuple[Question, ...]
    """Questions in the file's order."""
    left_out: tuple[tuple[int, str], ...]
    """Rows without a usable question, with the reason."""
    path: Path
    sha256: str

    @property
    def known_file(self) -> bool:
        """Whether the file is byte for byte one that the reader was tested with."""
        return self.sha256 in self.benchmark.sha256


def find(benchmark: Benchmark, directory: Path) -> Path | None:
    """Return the benchmark's file in a directory, by its name or a name under which it is published."""
    stems = (benchmark.name, *benchmark.also)
    names = [name for stem in stems for name in (stem, f"{stem}/test")]  # the second as in the authors' repository
    paths = (directory / f"{name}{suffix}" for name in names for suffix in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def download_hint(benchmark: Benchmark, directory: Path) -> str:
    """Return the line that explains how to get a missing file."""
    return (
        f"{benchmark.name}: no {directory / benchmark.name}.jsonl; get {benchmark.source} [{benchmark.licence}] and "
        f"store it there under this name ({', '.join(FORMATS)})"
    )


def read(benchmark: Benchmark, path: Path) -> TestSet:
    """Read a benchmark's file.

    Raises:
        UserError: the file is unreadable or contains no question.
    """
    content = path.read_bytes()
    questions, left_out = [], []
    for row in read_rows(path, content=content):
        value = row.needed()
        try:
            if not isinstance(value, dict):
                raise BadRowError("it is not an object")
            text, answers = benchmark.read_row(value)
        except BadRowError as problem:
            left_out.append((row.number, str(problem)))
        else:
            questions.append(Question(benchmark.name, f"{benchmark.name}-{row.number}", text, answers))
    if not questions:
        first = f"; the first row: {left_out[0][1]}" if left_out else ""
        raise UserError(f"{path}: no question of {benchmark.name} in {len(left_out)} rows{first}")
    return TestSet(benchmark, tuple(questions), tuple(left_out), path, hashlib.sha256(content).hexdigest())


def read_all(
    benchmarks: Sequence[Benchmark], directory: Path, *, skip_missing: bool
) -> tuple[list[TestSet], list[Benchmark]]:
    """Read the files of these benchmarks, and return the benchmarks whose file is missing.

    Raises:
        UserError: all files are missing, or one is and `skip_missing` is false.
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
        hint = "; --skip-missing leaves it out" if found else "; --data DIR names their directory"
        raise UserError(download_hint(missing[0], directory) + rest + hint)
    return found, missing
