"""The configuration file: unknown keys and bad values are rejected with a clear message."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tools_sandbox.config import ConfigError, Source, ToolServiceConfig, load_config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("limits:\n  memory_mb: 3\n", ["unknown key 'limits.memory_mb'", "'memory_mib'"]),
        ("search:\n  sources:\n    - {pth: x, format: jsonl}\n", ["search.sources.0.pth", "'path'"]),
        ("zzz: 1\n", ["unknown key 'zzz'", "max_concurrency"]),
        ("limits:\n  memory_mib: -1\n", ["limits.memory_mib", "must be at least 16"]),
        ("limits:\n  memory_mib: many\n", ["limits.memory_mib", "many"]),
        ("limits: {memory_mib: 10000000000000}\n", ["limits.memory_mib", "must be at most 16777216"]),
        ("limits: {file_mib: 100000000000000}\n", ["limits.file_mib", "must be at most"]),
        ("limits: {disk_mib: 100000000000000}\n", ["limits.disk_mib", "must be at most"]),
        ("limits: {memory_mib: 1}\n", ["limits.memory_mib", "must be at least 16"]),
        ("limits: {open_files: 3}\n", ["limits.open_files", "must be at least 16"]),
        ("limits: {processes: 5000000}\n", ["limits.processes", "must be at most 1048576"]),
        ("limits: {time_s: 1.0e+300}\n", ["limits.time_s", "must be at most"]),
        (
            "search: {engine: dense, dense: {url: 'host:80'}}",
            ["search.dense.url", "must be an address such as http://", "host:80"],
        ),
        ("browse: {base_url: 'file:///etc'}", ["browse.base_url", "must be an address such as http://"]),
        ("- 1\n", ["top level"]),
        ("a: [\n", ["not YAML"]),
        ("workers: 1\nworkers: 2\n", ["not YAML", 'duplicate key "workers"']),
    ],
)
def test_bad_value_or_key_is_named_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert len(str(caught.value).splitlines()) == 1
    for part in parts:
        assert part in str(caught.value)


def test_missing_and_empty_files_give_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert load_config(None) == load_config(tmp_path / "c.yaml") == ToolServiceConfig()


def test_paths_are_relative_to_config_file(tmp_path: Path) -> None:
    sources = "search: {sources: [{path: a.jsonl, format: jsonl}, {path: /b.json, format: arpo_cache}]}"
    (tmp_path / "c.yaml").write_text(f"{sources}\ncache: {{sqlite_path: c.db}}\n")
    config = load_config(tmp_path / "c.yaml")
    assert config.search.sources == (Source(tmp_path / "a.jsonl", "jsonl"), Source(Path("/b.json"), "arpo_cache"))
    assert config.cache.sqlite_path == tmp_path / "c.db"


@pytest.mark.parametrize("key", [field.name for field in fields(ToolServiceConfig)])
def test_misspelt_key_is_answered_with_right_one(tmp_path: Path, key: str) -> None:
    (tmp_path / "c.yaml").write_text(f"{key}s: 1\n")
    with pytest.raises(ConfigError, match=f"did you mean '{key}'"):
        load_config(tmp_path / "c.yaml")
