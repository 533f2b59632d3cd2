"""The search corpus: it reads files and yields passages and remembered queries."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools_sandbox.config import ConfigError, Source

_PAGE = re.compile(r"^Page \d+: ?", re.MULTILINE)
_QUERY_PREFIX = re.compile(r"^\s*search query\s*:\s*", re.IGNORECASE)
_CHUNK = 1 << 20


def normalise_query(query: str) -> str:
    """Return the form in which queries are compared: no leading "search query:", one case, single spaces."""
    return " ".join(_QUERY_PREFIX.sub("", query).casefold().split())


def read_passages(source: Source, snippet_chars: int) -> Iterator[str]:
    """Yield the passages of a source, each on one line with at most `snippet_chars` characters.

    Raises ConfigError with file and line if the file is missing or malformed.
    """
    if source.format == "arpo_cache":
        for _, pages in read_remembered(source, snippet_chars):
            yield from pages
    elif source.format == "parquet":
        for title, text in _from_parquet(source.path):
            yield from _passages(title, text, snippet_chars)
    else:
        for title, text in _from_jsonl(source.path):
            yield from _passages(title, text, snippet_chars)


def read_remembered(source: Source, snippet_chars: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the queries of an arpo_cache source with the pages that a search engine returned for them."""
    try:
        entries = json.loads(source.path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _unreadable(source.path, error) from error
    if not isinstance(entries, dict) or not all(isinstance(answer, str) for answer in entries.values()):
        raise ConfigError(f"search source {source.path}: expected one JSON object of strings, query -> answer")
    for query, answer in entries.items():
        # Text before the first page ("No search results found.") is not a page.
        pages = (" ".join(page.split())[:snippet_chars] for page in _PAGE.split(answer)[1:])
        yield query, [page for page in pages if page]


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError):
        return ConfigError(f"search source {path}: {error.strerror or error}")
    kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
    return ConfigError(f"search source {path}: not {kind}: {error}")


def _from_jsonl(path: Path) -> Iterator[tuple[str, str]]:
    try:
        # Only "\n" ends a line: JSON strings may contain the other separators of str.splitlines.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _entry(f"{path}, line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _entry(where: str, line: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"search source {where}: not JSON: {error}") from error
    return _title_and_text(where, entry if isinstance(entry, dict) else {})


def _from_parquet(path: Path) -> Iterator[tuple[str, str]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in ("title", "text") if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(batch_size=10_000, columns=columns):
                for entry in batch.to_pylist():
                    number += 1
                    yield _title_and_text(f"{path}, row {number}", entry)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"search source {path}: not Parquet, or not readable: {reason}") from error


def _title_and_text(where: str, entry: dict[str, Any]) -> tuple[str, str]:
    title, text = entry.get("title"), entry.get("text")
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise ConfigError(f'search source {where}: expected {{"title"?: string, "text": string}}')
    return title or "", text


def _passages(title: str, text: str, snippet_chars: int) -> Iterator[str]:
    """Yield a document in pieces of at most snippet_chars characters, cut between words, each preceded by the title."""
    lead = f"{' '.join(title.split())}: "[: snippet_chars // 2] if title.strip() else ""
    room = snippet_chars - len(lead)
    piece = ""
    # A word longer than a passage is split.
    words = (word[start : start + room] for word in text.split() for start in range(0, len(word), room))
    for word in words:
        if piece and len(piece) + 1 + len(word) > room:
            yield lead + piece
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    if piece:
        yield lead + piece
