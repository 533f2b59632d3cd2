"""Search: exact results for names, none for unknown names, old answers for remembered queries; and its index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tools_sandbox.client import SandboxClient
from tools_sandbox.config import ConfigError, SearchConfig, Source
from tools_sandbox.search.corpus import _passages, normalise_query
from tools_sandbox.search.index import SearchIndex, build, ensure_index, is_current
from tools_sandbox.search.tool import NO_RESULTS


def opened(folder: Path, *sources: Source) -> SearchIndex:
    """Build the index of some sources in this process, and open it."""
    build(SearchConfig(sources=sources, index_path=folder / "index"))
    return SearchIndex(folder / "index")


WORDS = st.text("abcdefgh", min_size=1, max_size=3)


def test_name_among_thousands_is_found_first(client: SandboxClient) -> None:
    assert client.call("search", {"query": "qzlf"}).text == "Page 1: qzlf 417"
    assert client.call("search", {"query": "What is the value of QZLF?", "k": 1}).text == "Page 1: qzlf 417"
    assert client.call("search", {"query": "grüße"}).text == "Page 1: Grüße 7"
    for number in range(0, 3000, 300):
        assert client.call("search", {"query": f"fact{number}"}).text == f"Page 1: fact{number} value{number}"


@pytest.mark.parametrize("query", ["unknownname", "what is unknownname", "?!", "fact"])
def test_unknown_name_finds_nothing(client: SandboxClient, query: str) -> None:
    answer = client.call("search", {"query": query})
    assert (answer.status, answer.text) == ("ok", NO_RESULTS)


def test_remembered_query_gets_its_old_answer(client: SandboxClient) -> None:
    both = "Page 1: Stanisław Lem wrote the novel.\nPage 2: A film followed in 1972."
    assert client.call("search", {"query": "who wrote solaris"}).text == both
    assert client.call("search", {"query": "Search query:  WHO wrote Solaris"}).text == both
    assert client.call("search", {"query": "who wrote solaris", "k": 1}).text == both.split("\n", maxsplit=1)[0]
    assert client.call("search", {"query": "capital of nowhere"}).text == NO_RESULTS
    assert client.call("search", {"query": "film 1972"}).text == "Page 1: A film followed in 1972."


def test_equal_search_is_cached(client: SandboxClient) -> None:
    first = client.call("search", {"query": "fact77 value77", "k": 2})
    again = client.call("search", {"k": 2, "query": "fact77 value77"})
    assert (first.cached, again.cached) == (False, True)
    assert first.text == again.text
    assert not client.call("search", {"query": "fact77 value77", "k": 3}).cached


def test_all_passages_of_long_document_are_found(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(1000))
    (tmp_path / "c.jsonl").write_text(json.dumps({"title": "A title", "text": text}) + "\n\n")
    index = opened(tmp_path, Source(tmp_path / "c.jsonl", "jsonl"))
    for number in (0, 500, 999):
        (found,) = index.ranked(f"word{number}", 10)
        assert found.startswith("A title: word")
        assert f"word{number}" in found
        assert len(found) <= 1000


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("jsonl", '{"text": "a"}\n{"txt": "b"}\n', "line 2"),
        ("jsonl", "nonsense\n", "line 1: not JSON"),
        ("jsonl", '{"text": "a", "title": 3}\n', "line 1"),
        ("arpo_cache", '["a"]', "one JSON object"),
        ("arpo_cache", "{", "not JSON"),
    ],
)
def test_damaged_source_is_reported_with_line(tmp_path: Path, kind: str, content: str, message: str) -> None:
    (tmp_path / "c").write_text(content)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, Source(tmp_path / "c", kind))  # type: ignore[arg-type]  # str for a Literal
    assert not (tmp_path / "index").exists()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=12), WORDS)
def test_search_finds_exactly_passages_with_word(tmp_path: Path, passages: list[str], word: str) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    found = opened(tmp_path, Source(tmp_path / "c.jsonl", "jsonl")).ranked(word, len(passages) + 1)
    assert sorted(found) == sorted({passage for passage in passages if word in passage.split()})


@given(st.text(), st.integers(1, 50), st.text(max_size=10))
def test_passages_keep_every_character_and_bound(text: str, bound: int, title: str) -> None:
    passages = list(_passages(title, text, bound))
    assert all(len(passage) <= bound for passage in passages)
    if not title.strip():
        assert "".join("".join(passages).split()) == "".join(text.split())


@given(st.text(max_size=30))
def test_query_normalisation_is_idempotent(query: str) -> None:
    once = normalise_query(query)
    assert normalise_query(f"  search query: {query.upper() if query.isascii() else query}") in (
        once,
        normalise_query(once),
    )


def test_parquet_and_jsonl_give_same_passages(tmp_path: Path) -> None:
    rows = [{"title": "Solaris", "text": "by Lem"}, {"title": None, "text": "a film of 1972"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [
        opened(tmp_path / kind, Source(tmp_path / f"c.{kind}", kind)).ranked("lem film", 5)
        for kind in ("parquet", "jsonl")
    ]
    assert sorted(found[0]) == sorted(found[1]) == ["Solaris: by Lem", "a film of 1972"]
    parquet.write_table(pyarrow.table({"title": ["x"], "body": ["y"]}), tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match="row 1"):
        opened(tmp_path, Source(tmp_path / "d.parquet", "parquet"))


def test_index_is_rebuilt_only_if_content_changes(tmp_path: Path) -> None:
    source = Source(tmp_path / "c.jsonl", "jsonl")
    config = SearchConfig(sources=(source,), index_path=tmp_path / "index")
    source.path.write_text('{"text": "alpha 1"}\n')
    assert not is_current(config)
    ensure_index(config)
    built = (tmp_path / "index" / "index.json").stat().st_ino
    fingerprint = SearchIndex(tmp_path / "index").fingerprint
    source.path.touch()  # a copy has another time
    ensure_index(config)
    assert (tmp_path / "index" / "index.json").stat().st_ino == built
    source.path.write_text('{"text": "alpha 2"}\n')
    assert not is_current(config)
    build(config)
    assert SearchIndex(tmp_path / "index").ranked("alpha", 1) == ["alpha 2"]
    assert SearchIndex(tmp_path / "index").fingerprint != fingerprint
    assert not is_current(replace(config, snippet_chars=10))


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()  # a thread of the library may still read the old file, which is mapped into memory
    path.write_bytes(content[: len(content) // 2])


def test_copied_index_is_current_and_one_without_description_is_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": f"fact{n} value{n}"}) + "\n" for n in range(300)))
    config = SearchConfig(sources=(Source(tmp_path / "c.jsonl", "jsonl"),), index_path=tmp_path / "index")
    build(config)
    for path in (tmp_path / "index").rglob("*"):
        os.utime(path)  # other times, as in a copy, are no damage
    assert is_current(config)
    (tmp_path / "index" / "index.json").unlink()
    assert not is_current(config)
    build(config)
    assert SearchIndex(tmp_path / "index").ranked("fact7", 1) == ["fact7 value7"]


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("bm25/meta.json", Path.unlink), ("bm25/*.idx", Path.unlink), ("remembered.db", cut), ("index.json", cut)],
)
def test_damaged_index_is_a_config_error(tmp_path: Path, pattern: str, damage: Callable[[Path], object]) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "fact"}\n')
    opened(tmp_path, Source(tmp_path / "c.jsonl", "jsonl"))
    damage(next((tmp_path / "index").glob(pattern)))
    with pytest.raises(ConfigError, match=r"index_path.*may be deleted"):
        SearchIndex(tmp_path / "index")


def test_folder_with_other_files_is_not_replaced_by_an_index(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "fact"}\n')
    with pytest.raises(ConfigError, match=r"holds other files \(c.jsonl\): name a new folder"):
        build(SearchConfig(index_path=tmp_path, sources=(Source(tmp_path / "c.jsonl", "jsonl"),)))
    assert (tmp_path / "c.jsonl").read_text() == '{"text": "fact"}\n'


def test_concurrent_builders_build_once_and_killed_one_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": f"fact{n} " * 50}) + "\n" for n in range(8_000)))
    (tmp_path / "c.yaml").write_text(
        "search: {sources: [{path: c.jsonl, format: jsonl}], index_path: index}\npython: {preload: []}\n"
    )
    command = [sys.executable, "-m", "tools_sandbox.search.index", "--config", str(tmp_path / "c.yaml")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start() as killed:
        while not (tmp_path / "index.building" / "bm25" / "meta.json").exists():
            assert killed.poll() is None
        killed.kill()
    assert not (tmp_path / "index").exists()
    with start() as one, start() as other:
        output = [builder.communicate(timeout=300)[0] for builder in (one, other)]
    assert output[0] == output[1]  # the same seconds: the second found the index of the first
    assert "8000 passages" in output[0]
    assert SearchIndex(tmp_path / "index").ranked("fact7", 1) == [" ".join(["fact7"] * 50)]
    assert not (tmp_path / "index.building").exists()


def test_ties_keep_corpus_order_without_duplicates(tmp_path: Path) -> None:
    texts = [f"same words {n:03}" for n in range(900)] + ["same words 000"] * 3
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert opened(tmp_path, Source(tmp_path / "c.jsonl", "jsonl")).ranked("same", 5) == texts[:5]
