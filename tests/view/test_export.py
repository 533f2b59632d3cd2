"""The exported page: one file that loads nothing, with hostile text as text, capped trees, and data that reads back."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.view.export import write_html
from arpo_megatron.view.pages import Pages
from arpo_megatron.view.runs import find_runs
from arpo_megatron.view.static_files import MODULES, static_file
from tests.view.stored_run import HOSTILE, make_run


class Elements(HTMLParser):
    """Collects elements with their attributes, and the texts of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.inside, data))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one")
    make_run(folder / "two", seed=2, steps=2, last=False)
    return Pages(find_runs([folder]))


def parsed(path: Path) -> tuple[Elements, dict[str, Any]]:
    page = Elements()
    page.feed(path.read_text())
    (data,) = [text for tag, text in page.texts if tag == "script" and text.startswith("{")]
    return page, json.loads(data)


def test_exported_page_has_no_external_reference(pages: Pages, tmp_path: Path) -> None:
    write_html(pages, tmp_path / "page.html", trees=4)
    page, _ = parsed(tmp_path / "page.html")
    for _, attributes in page.found:
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,", "#main")
    policies = [each["content"] for tag, each in page.found if tag == "meta" and "http-equiv" in each]
    assert len(policies) == 1 and policies[0] is not None
    assert policies[0].startswith("default-src 'none'; script-src 'sha256-")
    (script,) = [text for tag, text in page.texts if tag == "script" and not text.startswith("{")]
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)


def test_hostile_text_cannot_leave_the_data(pages: Pages, tmp_path: Path) -> None:
    write_html(pages, tmp_path / "page.html", trees=4)
    page, data = parsed(tmp_path / "page.html")
    assert [tag for tag, _ in page.found].count("script") == 2
    assert "img" not in [tag for tag, _ in page.found]
    assert HOSTILE in data["one/trees/4/0"]["prompt"]


def test_exported_trees_are_capped_and_counted(pages: Pages, tmp_path: Path) -> None:
    write_html(pages, tmp_path / "page.html", trees=4)
    _, data = parsed(tmp_path / "page.html")
    assert data[""]["runs"] == ["one", "two"]
    kept = [key for key in data if re.fullmatch(r"one/trees/\d+/\d+", key)]
    held_out = [key for key in data if re.fullmatch(r"one/trees/held-out-\d+/\d+", key)]
    assert 0 < len(kept) + len(held_out) <= 4 and len(kept) == len(held_out)
    assert data["one"]["held_out_tree_steps"] == [1, 4]
    stored = 4 * 3 + 2 * 3 + 3 * 3  # of the steps of both runs, and of three evaluations
    all_kept = [key for key in data if re.fullmatch(r"\w+/trees/[\w-]+/\d+", key)]
    assert data[""]["export"]["trees_left_out"] == stored - len(all_kept)
    assert [
        f"one/trees/{step}/{row['number']}" for step in data["one"]["tree_steps"] for row in data[f"one/trees/{step}"]
    ] == sorted(kept)
    write_html(pages, tmp_path / "page.html", trees=0)
    assert parsed(tmp_path / "page.html")[1]["one"]["tree_steps"] == []


def test_directory_that_cannot_be_written_is_one_line(pages: Pages, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        write_html(pages, tmp_path / "missing" / "page.html", trees=0)


def test_modules_join_into_one_script() -> None:
    """The exported page has the modules one after the other, so no two may define the same name."""
    defined: dict[str, str] = {}
    for module in MODULES:
        found = static_file(module)
        assert found is not None
        for name in re.findall(r"^(?:export )?(?:async )?(?:class|const|let|function) (\w+)", found[0], re.MULTILINE):
            assert name not in defined, f"{module} and {defined[name]} define {name}"
            defined[name] = module
        for names, source in re.findall(r"^import \{([^}]*)\} from \"\./(.*)\";", found[0], re.MULTILINE):
            assert MODULES.index(source) < MODULES.index(module)
            imported = [name for name in re.split(r"[,\s]+", names) if name]
            assert all(defined.get(name) == source for name in imported), f"{module} imports {names}"
            unused = [name for name in imported if len(re.findall(rf"\b{name}\b", found[0])) < 2]
            assert not unused, f"{module} imports {unused} and does not use it"


def test_files_of_the_page_can_be_read_in_one_sitting() -> None:
    for name in ("index.html", "style.css", *MODULES):
        found = static_file(name)
        assert found is not None
        lines = found[0].splitlines()
        assert len(lines) <= 400, name
        assert max(map(len, lines)) <= 120, name
