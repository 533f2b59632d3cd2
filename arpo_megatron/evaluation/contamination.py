"""Which evaluation questions are also in the training data.

A question is held to be there where a training question has the same words, or at least half of its runs of 13 words
(the length that GPT-3's decontamination used, arXiv 2005.14165, appendix C). One shared run alone says little: "where
m and n are relatively prime positive integers, find m + n" ends many a contest problem. A shorter question has no such
run: it is there where a training question has all of it in a row. A paraphrase is not found.

Chinese and Japanese are written without spaces: there every character is a word.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.utils.table_reader import FORMATS, BadRowError, read_rows

WORDS_IN_A_ROW = 13
FEWEST_WORDS = 5
"""Of a question that is looked for inside others: "Compute 2^3" is a part of many, and only the same words are it."""
ENOUGH = 0.5
"""Share of a question's runs."""
_FIELDS = tuple(
    dict.fromkeys(("messages", "prompt", *(name for each in BENCHMARKS.values() for name in each.columns[0])))
)
"""Of a training row, in which its questions stand: conversations, and what benchmarks call a question."""
_UNSPACED = "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Characters of Chinese and Japanese: ideographs, their iteration mark and zero, kana."""
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """An evaluation question that the training data holds, and the training question it was found in.

    Attributes:
        question: of the benchmark.
        training_row: number of the training question, from 0.
        training_text: its text.
        share: of the question's runs of 13 words that the training question has; 1 where it has all words in a row.
    """

    question: Question
    training_row: int
    training_text: str
    share: float


def find_overlaps(questions: Sequence[Question], training: Iterable[str]) -> list[Overlap]:
    """The questions that training texts contain, each once, with the text that has most of it, in their own order."""
    whole: dict[tuple[str, ...], list[int]] = defaultdict(list)
    runs: dict[tuple[str, ...], list[int]] = defaultdict(list)
    short: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = defaultdict(list)  # by their first words
    for index, question in enumerate(questions):
        words = _words(question.text)
        whole[words].append(index)
        for run in _runs(words):
            runs[run].append(index)
        if FEWEST_WORDS <= len(words) < WORDS_IN_A_ROW:
            short[words[:FEWEST_WORDS]].append((index, words))
    found: dict[int, Overlap] = {}
    for row, text in enumerate(training):
        words = _words(text)
        shared = Counter(index for run in _runs(words) for index in runs.get(run, ()))
        shares = {index: count / len(_runs(_words(questions[index].text))) for index, count in shared.items()}
        shares |= dict.fromkeys(whole.get(words, ()), 1.0)
        for start in range(len(words) - FEWEST_WORDS + 1 if short else 0):
            for index, asked in short.get(words[start : start + FEWEST_WORDS], ()):
                if words[start : start + len(asked)] == asked:
                    shares[index] = 1.0
        for index, share in shares.items():
            if share >= ENOUGH and (index not in found or share > found[index].share):
                found[index] = Overlap(questions[index], row, text, share)
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True, slots=True)
class TrainingQuestions:
    """What a training file asks.

    Attributes:
        path: of the file.
        texts: of its questions; at least one.
        rows: how many it has.
        unread: rows in which there is no question, by number from 0, with the reason.
    """

    path: Path
    texts: Sequence[str]
    rows: int
    unread: Sequence[tuple[int, str]]

    @property
    def note(self) -> str:
        """The line about what was not looked through; empty where everything was."""
        if not self.unread:
            return ""
        row, reason = self.unread[0]
        return (
            f"{len(self.unread)} of {self.rows} rows of {self.path} could not be read, so no question was looked for "
            f"in them; the first (row {row}): {reason}"
        )


def training_questions(path: Path, key: str) -> TrainingQuestions:
    """The questions of a training file (of `FORMATS`): what users say in conversations, the released ARPO
    files included, and what stands under a benchmark's name for its questions.

    Args:
        path: of the file.
        key: what stands before the path where it was given, e.g. "--train-data ".

    Raises:
        UserError: no such file, none of these formats, or not one row with a question.
    """
    if path.is_file() and path.suffix not in FORMATS:
        raise UserError(f"{key}{path}: training questions are read from {', '.join(FORMATS)} files")
    texts: list[str] = []
    unread: list[tuple[int, str]] = []
    rows = 0
    for row in read_rows(path, key, columns=(*_FIELDS, "canary")):
        rows += 1
        try:
            texts += _asked(row.value())
        except BadRowError as problem:
            unread.append((row.number, str(problem)))
    if not texts:
        first = f"; the first: {unread[0][1]}" if unread else ""
        raise UserError(
            f"{key}{path}: not one question in its {rows} rows; expected a conversation under messages or "
            f"prompt, or a text under {', '.join(_FIELDS[1:-1])} or {_FIELDS[-1]}{first}"
        )
    return TrainingQuestions(path, texts, rows, unread)


def _asked(row: Any) -> list[str]:
    """The questions of a row, at least one. What it could not be trained on for does not matter here."""
    if not isinstance(row, Mapping):
        raise BadRowError("it is no object")
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
    """Text, also where it comes in OpenAI's list of parts; empty where it is none."""
    parts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return content if isinstance(content, str) else " ".join(part for part in parts if isinstance(part, str))


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[start : start + WORDS_IN_A_ROW] for start in range(len(words) - WORDS_IN_A_ROW + 1)}
