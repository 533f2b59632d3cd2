"""A hook of mkdocs: a link to a file outside docs/ becomes plain text, because the site has no such page."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
_LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page without links to files of the repository that are not pages. Called by mkdocs."""
    folder = Path(page.file.abs_src_path).parent

    def plain(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        return link[1] if target.exists() and DOCS not in target.parents else link[0]

    return _LINK.sub(plain, markdown)
