"""Search for evaluation questions in the training data.

A question counts as found if a training question has the same words, or at least half of its 13-grams (the length of
GPT-3's decontamination, arXiv 2005.14165, appendix C). One shared 13-gram is not enough: "where m and n are relatively
prime positive integers, find m + n" ends many contest problems. A question with fewer words is found if a training
question contains all of them in sequence. Paraphrases are not found.

Chinese and Japanese are written without spaces, so each character counts as a word.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.config import DataConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.tasks.files.reader import read_tasks
from arpo_megatron.utils.table_reader import FORMATS, BadRowError, read_rows

NGRAM = 13
MIN_CONTAINED_WORDS = 5
"""Fewest words of a question that is searched inside others: "Compute 2^3" is part of many questions."""
MIN_SHARE = 0.5
"""Share of a question's n-grams that must be found."""
_FIELDS = tuple(
    dict.fromkeys(("messages", "prompt", *(name for each in BENCHMARKS.values() for name in each.columns[0])))
)
"""Fields of a training row that may contain questions: conversations, and the question fields of benchmarks."""
_UNSPACED = "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Characters of Chinese and Japanese: ideographs, their iteration mark and zero, kana."""
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """An evaluation question that was found in the training data."""

    question: Question
    training_row: int
    """Number of the training question, from 0."""
    training_text: str
    share: float
    """Share of the question's 13-grams in the training question; 1 if all words match."""


def find_overlaps(questions: Sequence[Question], training: Iterable[str]) -> list[Overlap]:
    """Return the questions found in the training texts, in their order, each with its best match."""
    whole: dict[tuple[str, ...], list[int]] = defaultdict(list)
    ngrams: dict[tuple[str, ...], list[int]] = defaultdict(list)
    short: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = defaultdict(list)  # by their first words
    for index, question in enumerate(questions):
        words = _words(question.text)
        whole[words].append(index)
        for ngram in _ngrams(words):
            ngrams[ngram].append(index)
        if MIN_CONTAINED_WORDS <= len(words) < NGRAM:
            short[words[:MIN_CONTAINED_WORDS]].append((index, words))
    found: dict[int, Overlap] = {}
    for row, text in enumerate(training):
        words = _words(text)
        shared = Counter(index for ngram in _ngrams(words) for index in ngrams.get(ngram, ()))
        shares = {index: count / len(_ngrams(_words(questions[index].text))) for index, count in shared.items()}
        shares |= dict.fromkeys(whole.get(words, ()), 1.0)
        for start in range(len(words) - MIN_CONTAINED_WORDS + 1 if short else 0):
            for index, asked in short.get(words[start : start + MIN_CONTAINED_WORDS], ()):
                if words[start : start + len(asked)] == asked:
                    shares[index] = 1.0
        for index, share in shares.items():
            if share >= MIN_SHARE and (index not in found or share > found[index].share):
                found[index] = Overlap(questions[index], row, text, share)
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True, slots=True)
class TrainingQuestions:
    """The questions of a training file."""

    path: Path
    texts: Sequence[str]
    """At least one question."""
    rows: int
    unread: Sequence[tuple[int, str]]
    """Rows without a question: number from 0, and the reason."""

    @property
    def note(self) -> str:
        """Note about rows that were not searched; empty if there are none."""
        if not self.unread:
            return ""
        row, reason = self.unread[0]
        return (
            f"{len(self.unread)} of {self.rows} rows of {self.path} could not be read and were not searched; "
            f"the first (row {row}): {reason}"
        )


def training_questions(path: Path, key: str) -> TrainingQuestions:
    """Read the questions of a training file: user turns of conversations, and the question fields of benchmarks.

    Args:
        path: the file, in one of `FORMATS`.
        key: option or key before the path in error messages, e.g. "--train-data ".

    Raises:
        UserError: the file is missing, has another format, or contains no question.
    """
    if path.is_file() and path.suffix not in FORMATS:
        raise UserError(f"{key}{path}: training questions are read from {', '.join(FORMATS)} files")
    texts: list[str] = []
    unread: list[tuple[int, str]] = []
    rows = 0
    for row in read_rows(path, key, columns=(*_FIELDS, "canary")):
        rows += 1
        try:
            texts += _row_questions(row.value())
        except BadRowError as problem:
            unread.append((row.number, str(problem)))
    if not texts:
        first = f"; the first: {unread[0][1]}" if unread else ""
        raise UserError(
            f"{key}{path}: no question in its {rows} rows; expected a conversation under messages or "
            f"prompt, or a text under {', '.join(_FIELDS[1:-1])} or {_FIELDS[-1]}{first}"
        )
    return TrainingQuestions(path, texts, rows, unread)


def questions_of(data: DataConfig) -> TrainingQuestions:
    """Read the questions of a run's training files. Raises UserError if one is missing or has no usable row."""
    read = read_tasks(data)
    texts = [turn["content"] for task in read.tasks for turn in task.messages if turn["role"] == "user"]
    unread = [(row.row, row.reason) for row in read.bad_rows]
    return TrainingQuestions(data.sources[0][0], texts, len(read.tasks) + len(unread), unread)


def _row_questions(row: Any) -> list[str]:
    """Return the questions of a row, at least one, even if the row is unusable for training."""
    if not isinstance(row, Mapping):
        raise BadRowError("it is not an object")
    if row.get("canary"):
        raise BadRowError("it is encrypted")
    found: list[str] = []
    for name in _FIELDS:
        value = row.get(name)
        turns = value if isinstance(value, list) else [{"role": "user", "content": value}]
        users = [turn.get("content") for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
        found += [text for content in users if (text := _text(content)).strip()]
    if not found:
        names = ", ".join(map(str, list(row)[:10])) or "no fields"
        raise BadRowError(f"no question in it; it has {names}")
    return found


def _text(content: Any) -> str:
    """Return a text, also from OpenAI's list of parts; empty for anything else."""
    parts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return content if isinstance(content, str) else " ".join(part for part in parts if isinstance(part, str))


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _ngrams(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1)}
