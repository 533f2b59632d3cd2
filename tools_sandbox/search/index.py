"""The index of the search sources: a BM25 index of their passages and the remembered queries, in one folder.

The index is built once, by a separate process whose memory is freed afterwards. It is built under a lock in a second
folder, so that a killed build leaves no incomplete index. Every worker opens it; the library maps the files into
memory, so the workers share them. `python -m tools_sandbox.search.index --config FILE` builds it ahead of a job.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tantivy
from pydantic import TypeAdapter
from tantivy import DocAddress, Document, Index, Occur, Query, Searcher

from tools_sandbox.config import ConfigError, SearchConfig, load_config
from tools_sandbox.search.corpus import content_digest, normalise_query, read_passages, read_remembered
from tools_sandbox.search.stopwords import IGNORED_IN_QUERIES

log = logging.getLogger("tools_sandbox")

_FORMAT = 3
"""Version of the folder's format. An index of another version is rebuilt."""
_FILES = {"index.json", "bm25", "remembered.db"}
"""Entries of the folder."""
_HEAP_BYTES_PER_THREAD = 64 << 20
# One regular expression splits passages and queries, since Rust's \w also matches combining marks.
_ANALYZER = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(r"\w+")).build()
_MAX_TIES = 4096
_MAX_WORD_BYTES = 60_000
"""The library omits longer words from an index and rejects them in a query."""


def ensure_index(config: SearchConfig) -> None:
    """Build the index at `config.index_path` in a separate process unless it is up to date. Raises ConfigError."""
    assert config.index_path is not None
    if is_current(config):
        return
    if config.index_path.exists():
        log.warning("search.index_path: %s is damaged or of other sources, and is rebuilt", config.index_path)
    values = json.dumps(TypeAdapter(SearchConfig).dump_python(config, mode="json"))
    command = [sys.executable, "-m", "tools_sandbox.search.index", "--search", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().removeprefix("tools_sandbox: "))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"search.index_path: {config.index_path}: building the index failed: {last}")


def is_current(config: SearchConfig) -> bool:
    """Return True if the folder holds an index of the sources in their present state.

    A source is read only if its size or time differs from the recorded one.
    """
    meta = _read_meta(config)
    if meta is None or meta["settings"] != _settings(config):
        return False
    if meta["stats"] == [_stat(source.path) for source in config.sources]:
        return True
    digests: list[str] = meta["digests"]
    return digests == [content_digest(source.path) for source in config.sources]


def build(config: SearchConfig) -> dict[str, Any]:
    """Build the index unless another process does so first. Return its description. Raises ConfigError."""
    assert config.index_path is not None
    folder = config.index_path
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_current(config):
                _refuse_other_files(folder)
                _build_and_replace(config, folder)
    except OSError as error:
        raise ConfigError(f"search.index_path: {folder}: {error.strerror or error}") from error
    meta = _read_meta(config)
    assert meta is not None
    return meta


def _refuse_other_files(folder: Path) -> None:
    # The folder is deleted and written again.
    others = {path.name for path in folder.iterdir()} - _FILES if folder.is_dir() else set()
    if others:
        raise ConfigError(f"search.index_path: {folder} holds other files ({min(others)}): name a new folder")


def _build_and_replace(config: SearchConfig, folder: Path) -> None:
    began = time.monotonic()
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # left by a killed build: we hold the lock
    building.mkdir()
    try:
        stats = [_stat(source.path) for source in config.sources]
        passages = _write_passages(config, building / "bm25") if config.engine == "local" else 0
        remembered = _write_remembered(config, building / "remembered.db")
        meta: dict[str, Any] = {
            "settings": _settings(config),
            "stats": stats,
            "digests": [content_digest(source.path) for source in config.sources],
            "passages": passages,
            "remembered": remembered,
            "seconds": round(time.monotonic() - began, 1),
        }
        (building / "index.json").write_text(json.dumps(meta))
        for path in [*building.rglob("*"), building]:
            _flush(path)  # before the rename: a folder with its final name is whole, also after a power cut
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_passages(config: SearchConfig, folder: Path) -> int:
    folder.mkdir()
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_bytes_field("passage", stored=True)
    builder.add_unsigned_field("position", fast=True)
    index = Index(builder.build(), path=str(folder))
    index.register_tokenizer("words", _ANALYZER)
    threads = min(os.cpu_count() or 1, 8)
    writer = index.writer(threads * _HEAP_BYTES_PER_THREAD, threads)
    number = 0
    for passage in _all_passages(config):
        document = Document()
        document.add_text("words", passage.casefold())
        document.add_bytes("passage", passage.encode("utf-8"))
        document.add_unsigned("position", number)
        writer.add_document(document)
        number += 1
    writer.commit()
    writer.wait_merging_threads()
    return number


def _all_passages(config: SearchConfig) -> Iterator[str]:
    for source in config.sources:
        for passage in read_passages(source, config.snippet_chars):
            # A JSON escape may produce a lone surrogate, which UTF-8 cannot represent.
            yield passage.encode("utf-8", "replace").decode("utf-8")


def _write_remembered(config: SearchConfig, path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE remembered (query TEXT PRIMARY KEY, pages TEXT) WITHOUT ROWID")
        for source in config.sources:
            if source.format == "arpo_cache":
                rows = (
                    (json.dumps(normalise_query(query)), json.dumps(pages))
                    for query, pages in read_remembered(source, config.snippet_chars)
                )
                database.executemany("INSERT OR REPLACE INTO remembered VALUES (?, ?)", rows)
        return int(database.execute("SELECT count(*) FROM remembered").fetchone()[0])


def _settings(config: SearchConfig) -> dict[str, Any]:
    sources = [[str(source.path), source.format] for source in config.sources]
    return {"format": _FORMAT, "sources": sources, "snippet_chars": config.snippet_chars, "engine": config.engine}


def _read_meta(config: SearchConfig) -> dict[str, Any] | None:
    assert config.index_path is not None
    try:
        meta: dict[str, Any] = json.loads((config.index_path / "index.json").read_text())
    except (OSError, ValueError):
        return None
    return meta


def _stat(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"search source {path}: {error.strerror}") from error
    return [found.st_size, found.st_mtime_ns]


class SearchIndex:
    """Passages and remembered queries in a folder that `build` has written. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder cannot be opened, for example because it was damaged meanwhile."""
        try:
            self._open(folder)
        except (OSError, ValueError, KeyError, sqlite3.Error) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"search.index_path: {folder}: {reason}; it may be deleted") from error

    def _open(self, folder: Path) -> None:
        meta = json.loads((folder / "index.json").read_text())
        content = [meta["settings"] | {"sources": [kind for _, kind in meta["settings"]["sources"]]}, meta["digests"]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        """Changes when the content of a source changes."""
        self.passages: int = meta["passages"]
        # Several threads read it and none writes.
        self._remembered = sqlite3.connect(
            f"{(folder / 'remembered.db').resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
        )
        self._remembered.execute("SELECT query FROM remembered LIMIT 1")
        self._bm25 = Index.open(str(folder / "bm25")) if self.passages else None

    def remembered(self, query: str) -> list[str] | None:
        """Return the pages that an arpo_cache source holds for a query; None if no source holds the query."""
        key = json.dumps(normalise_query(query))
        row = self._remembered.execute("SELECT pages FROM remembered WHERE query = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def ranked(self, query: str, k: int) -> list[str]:
        """Return at most k distinct passages that contain a word of the query, best first.

        Passages with equal scores keep the order of the corpus (among the first 4096), so answers are deterministic.
        """
        words = query_words(query)
        if self._bm25 is None or not words:
            return []
        searcher = self._bm25.searcher()
        found = dict[str, None]()
        for address in self._in_order(searcher, words, k):
            found[searcher.doc(address)["passage"][0].decode("utf-8")] = None
            if len(found) == k:
                break
        return list(found)

    def _in_order(self, searcher: Searcher, words: list[str], k: int) -> list[DocAddress]:
        """Return the best hits by score, then by position in the corpus. More than k, since some may be duplicates."""
        assert self._bm25 is not None
        terms = [(Occur.Should, Query.term_query(self._bm25.schema, "words", word, "freq")) for word in words]
        limit = 2 * k + 32
        while True:
            hits = searcher.search(Query.boolean_query(terms), limit, count=False).hits
            scores = [round(score, 5) for score, _ in hits]
            # If the last hit is as good as the k-th, hits with the same score may be missing.
            if len(hits) < limit or scores[-1] < scores[k - 1] or limit >= _MAX_TIES:
                break
            limit *= 8
        if not hits:
            return []
        positions = searcher.fast_field_values("position", [address for _, address in hits])
        order = sorted(range(len(hits)), key=lambda i: (-scores[i], positions[i]))
        return [hits[i][1] for i in order]


def query_words(query: str) -> list[str]:
    """Return the words to search for: those of the query without stop words, or all if there are only stop words.

    Otherwise "what is <unknown name>" would find every passage with an "is".
    """
    text = normalise_query(query).encode("utf-8", "replace").decode("utf-8")
    words = [word for word in _ANALYZER.analyze(text) if len(word.encode()) < _MAX_WORD_BYTES]
    return [word for word in words if word not in IGNORED_IN_QUERIES] or words


def main() -> None:
    """Build the index of a configuration. Exit code 2: it cannot be built, with the reason in one line."""
    parser = argparse.ArgumentParser(prog="python -m tools_sandbox.search.index", description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="the service's YAML file")
    source.add_argument("--search", choices=["-"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.search:
            config = TypeAdapter(SearchConfig).validate_python(json.load(sys.stdin))
        else:
            config = load_config(arguments.config).search
        if config.index_path is None:
            raise ConfigError("search.index_path: is not set, so there is no folder for the index")
        built = build(config)
    except ConfigError as error:
        print(f"tools_sandbox: {error}", file=sys.stderr)
        sys.exit(2)
    if arguments.config:
        counts = f"{built['passages']} passages, {built['remembered']} remembered queries"
        print(f"{config.index_path}: {counts}, built in {built['seconds']} s")


if __name__ == "__main__":
    main()
