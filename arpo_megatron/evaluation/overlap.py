"""Which evaluation questions are also in the training data.

A question is held to be there where a training question has the same words, or at least half of its runs of 13 words
(the length that GPT-3's decontamination used, arXiv 2005.14165, appendix C). One shared run alone says little: "where
m and n are relatively prime positive integers, find m + n" ends many a contest problem. A paraphrase is not found.

Chinese and Japanese are written without spaces: there every character is a word.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.tasks import arpo_parquet, messages

WORDS_IN_A_ROW = 13
ENOUGH = 0.5
"""Share of a question's runs."""
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
        share: of the question's runs of 13 words that the training question has; 1 where all words are the same.
    """

    question: Question
    training_row: int
    training_text: str
    share: float


def overlaps(questions: Sequence[Question], training: Iterable[str]) -> list[Overlap]:
    """The questions that training texts contain, each once, with the text that has most of it, in their own order."""
    whole: dict[tuple[str, ...], list[int]] = defaultdict(list)
    runs: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        words = _words(question.text)
        whole[words].append(index)
        for run in _runs(words):
            runs[run].append(index)
    found: dict[int, Overlap] = {}
    for row, text in enumerate(training):
        words = _words(text)
        shared = Counter(index for run in _runs(words) for index in runs.get(run, ()))
        shares = {index: count / len(_runs(_words(questions[index].text))) for index, count in shared.items()}
        shares |= dict.fromkeys(whole.get(words, ()), 1.0)
        for index, share in shares.items():
            if share >= ENOUGH and (index not in found or share > found[index].share):
                found[index] = Overlap(questions[index], row, text, share)
    return [found[index] for index in sorted(found)]


def training_questions(path: Path, key: str) -> list[str]:
    """The questions of a training file: released ARPO parquet, or conversations (.jsonl, .json, .parquet).

    Args:
        path: of the file.
        key: what stands before the path where it was given, e.g. "--train-data ".

    Raises:
        UserError: no such file, or neither of these.
    """
    if not path.is_file():
        raise UserError(f"{key}{path}: no such file")
    if path.suffix == ".parquet":
        with suppress(UserError):
            return [task.messages[-1]["content"] for task in arpo_parquet.read_parquet(path).tasks]
    found: list[str] = []
    for row in messages.read_rows(path, key):
        try:
            conversation = messages.check_row(row)
        except messages.BadRowError:
            continue  # what cannot be trained on taught nothing
        found += [str(turn["content"]) for turn in conversation.messages if turn["role"] == "user"]
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[start : start + WORDS_IN_A_ROW] for start in range(len(words) - WORDS_IN_A_ROW + 1)}
