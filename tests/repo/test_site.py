"""The site of docs/ builds without a warning, loads nothing from another host, and its pages say what they teach."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "studies" not in page.parts]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # `strict` makes a warning an error
    return folder


def test_every_page_is_built(site: Path) -> None:
    wanted = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES}
    assert wanted <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\s\">]+)|<link[^>]*rel=\"?stylesheet[^>]*https?:"
    )
    assert not [page.name for page in site.rglob("*.html") if loaded.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_begins_with_what_its_reader_can_do(page: Path) -> None:
    title, _, rest = page.read_text().partition("\n\n")
    assert title.startswith("# ") and re.search(r"After (reading )?this\s+page", rest.partition("\n\n")[0])
