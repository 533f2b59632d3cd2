"""Readers for rows of released benchmark files: each returns the question and its accepted answers."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from arpo_megatron.tasks.tags.response import last_boxed
from arpo_megatron.utils.table_reader import BadRowError
from arpo_megatron.utils.text import whole_characters

Row = Mapping[str, Any]
QuestionAnswers = tuple[str, tuple[str, ...]]
"""A question and its accepted answers, at least one."""


def plain(row: Row, questions: Sequence[str], answers: Sequence[str]) -> QuestionAnswers:
    """Read question and answer from the first of these fields in the row; an answer is text, a number or a list."""
    question = _first(row, questions)
    if not isinstance(question, str) or not question.strip():
        raise BadRowError(f"no question ({' or '.join(questions)})")
    found = _first(row, answers)
    several = found if isinstance(found, list | tuple) else [found]
    accepted = [text for item in several if item is not None and (text := whole_characters(str(item).strip()))]
    if not accepted:
        raise BadRowError(f"no answer ({' or '.join(answers)})")
    return whole_characters(question.strip()), tuple(dict.fromkeys(accepted))


def after_hashes(row: Row, questions: Sequence[str], answers: Sequence[str]) -> QuestionAnswers:
    """Read a GSM8K row, whose solution ends with `#### 1,234`."""
    question, accepted = plain(row, questions, answers)
    return question, tuple(text.rpartition("####")[2].strip() for text in accepted)


def boxed(row: Row, questions: Sequence[str], answers: Sequence[str]) -> QuestionAnswers:
    """Read a MATH row, whose answer is the last box of its solution, unless the file has a separate answer."""
    question, accepted = plain(row, questions, answers)
    return question, tuple(text if (box := last_boxed(text)) is None else box for text in accepted)


def without_attachment(row: Row, questions: Sequence[str], answers: Sequence[str]) -> QuestionAnswers:
    """Read a GAIA or HLE row, and reject rows with a file or an image: the paper uses text only."""
    for name in ("file_name", "image"):
        if row.get(name):
            raise BadRowError(f"it needs its {name.replace('_name', '')}; only text questions are supported")
    return plain(row, questions, answers)


def xor_encrypted(row: Row, questions: Sequence[str], answers: Sequence[str]) -> QuestionAnswers:
    """Read an xbench row: base64 of the text XOR the row's repeated `canary`; a row without canary is plain text."""
    canary = row.get("canary")
    if not canary:
        return plain(row, questions, answers)
    key = str(canary).encode()

    def text(value: object) -> str:
        try:
            data = base64.b64decode(str(value), validate=True)
            return bytes(byte ^ key[index % len(key)] for index, byte in enumerate(data)).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadRowError("it cannot be decrypted with its canary") from None

    question, accepted = plain(row, questions, answers)
    return text(question), tuple(map(text, accepted))


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)
