"""The search corpus: files in, passages and remembered queries out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools_sandbox.config import ConfigError, Source

_PAGE = re.compile(r"^Page \d+: ?", re.MULTILINE)
_QUERY_PREFIX = re.compile(r"^\s*search query\s*:\s*", re.IGNORECASE)


@dataclass(slots=True)
class Corpus:
    """What the search tool searches."""

    passages: list[str] = field(default_factory=list)
    """Distinct, on one line each, at most `snippet_chars` long."""
    remembered: dict[str, list[str]] = field(default_factory=dict)
    """Normalised query -> the pages a search engine once answered; empty if it found none."""
    fingerprint: str = ""
    """Changes when any source does."""


def normalise_query(query: str) -> str:
    """The form in which queries are compared: no "search query:" in front, one case, single spaces."""
    return " ".join(_QUERY_PREFIX.sub("", query).casefold().split())


def load_corpus(sources: tuple[Source, ...], snippet_chars: int) -> Corpus:
    """Read all sources. ConfigError: a file is missing or not of its format; the message names file and line."""
    corpus = Corpus()
    digest = hashlib.sha256(str(snippet_chars).encode())
    distinct: dict[str, None] = {}
    for source in sources:
        try:
            data = source.path.read_bytes()
            content = data.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"search source {source.path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"search source {source.path}: not UTF-8: {error}") from error
        digest.update(source.format.encode() + hashlib.sha256(data).digest())
        if source.format == "jsonl":
            distinct.update((passage, None) for passage in _from_jsonl(source.path, content, snippet_chars))
        else:
            for query, pages in _from_arpo_cache(source.path, content, snippet_chars):
                corpus.remembered[normalise_query(query)] = pages
                distinct.update((page, None) for page in pages)
    corpus.passages = list(distinct)
    corpus.fingerprint = digest.hexdigest()
    return corpus


def _from_jsonl(path: Path, content: str, snippet_chars: int) -> Iterator[str]:
    # Only "\n" ends a line: JSON strings may hold the other separators that str.splitlines knows.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"search source {path}, line {number}: not JSON: {error}") from error
        title = entry.get("title") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str) or not isinstance(title, str | None):
            raise ConfigError(f'search source {path}, line {number}: expected {{"title"?: string, "text": string}}')
        yield from _passages(title or "", entry["text"], snippet_chars)


def _from_arpo_cache(path: Path, content: str, snippet_chars: int) -> Iterator[tuple[str, list[str]]]:
    try:
        entries = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(f"search source {path}: not JSON: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(answer, str) for answer in entries.values()):
        raise ConfigError(f"search source {path}: expected one JSON object of strings, query -> answer")
    for query, answer in entries.items():
        # What stands before the first page ("No search results found.") is no page.
        pages = (" ".join(page.split())[:snippet_chars] for page in _PAGE.split(answer)[1:])
        yield query, [page for page in pages if page]


def _passages(title: str, text: str, snippet_chars: int) -> Iterator[str]:
    """A document in pieces of at most snippet_chars characters, cut between words, each led by the title."""
    lead = f"{' '.join(title.split())}: "[: snippet_chars // 2] if title.strip() else ""
    room = snippet_chars - len(lead)
    piece = ""
    # A word longer than a passage is cut inside.
    words = (word[start : start + room] for word in text.split() for start in range(0, len(word), room))
    for word in words:
        if piece and len(piece) + 1 + len(word) > room:
            yield lead + piece
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    if piece:
        yield lead + piece
