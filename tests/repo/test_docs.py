"""What the documents say is so."""

import importlib.util
import re
from pathlib import Path

import pytest

from arpo_megatron.registry import BUILTIN, ExtensionPoint, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_configuration_reference_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text() == module.render(), "run `make docs`"
    page = (ROOT / "docs" / "run-directory.md").read_text()
    assert page == module.render_metrics(page), "run `make docs`"
    page_of_clusters = (ROOT / "docs" / "cluster.md").read_text()
    assert page_of_clusters == module.render_profile(page_of_clusters), "run `make docs`"
    methods = (ROOT / "docs" / "algorithms.md").read_text()
    assert methods == module.render_algorithms(methods), "run `make docs`"
    for name in ("reward", "pack/unique", "grad_norm", "trainer/mfu", "seconds/update", "held_out_loss"):
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for name in re.findall(r"`((?:arpo_megatron|recipes|tools_sandbox|tests|docs|scripts)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_merge_was_left_half_done(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|>{7}) .*$", page.read_text(), re.MULTILINE)


NO_METHOD = {"epochs", "random", "format", "length", "tool_calls"}
"""Parts that no paper describes: the plain order, a control arm, and measures."""
PARTS = [
    (point, name)
    for point in BUILTIN
    if point is not ExtensionPoint.PRESET
    for name in BUILTIN[point]
    if name not in NO_METHOD
]


@pytest.mark.parametrize(("point", "name"), PARTS, ids=[f"{point.name}-{name}" for point, name in PARTS])
def test_a_part_of_a_method_names_its_paper(point: ExtensionPoint, name: str) -> None:
    """In the words of the class, which docs/algorithms.md repeats."""
    assert re.search(r"arXiv \d{4}\.\d{5}", load(point, name).__doc__)


def test_the_table_of_losses_has_every_loss_once() -> None:
    notation, _, _ = (ROOT / "docs" / "algorithms.md").read_text().partition("<!-- presets: begin -->")
    assert sorted(re.findall(r"^\| `(\w+)` \|", notation, re.MULTILINE)) == sorted(BUILTIN[ExtensionPoint.LOSS])


def test_the_training_loop_fits_on_two_screens() -> None:
    assert len((ROOT / "arpo_megatron" / "train.py").read_text().splitlines()) <= 100


def test_no_source_file_holds_two_ideas() -> None:
    sources = [*ROOT.glob("arpo_megatron/**/*.py"), *ROOT.glob("tools_sandbox/**/*.py"), *ROOT.glob("recipes/*.py")]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert not {name: lines for name, lines in long.items() if lines > 500}
