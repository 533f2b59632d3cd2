"""The page itself: HTML, style and ES modules, as files for the server and as one HTML text."""

import base64
import hashlib
import re
from importlib.resources import files

_FOLDER = files("arpo_megatron.view") / "static"
MODULES = (
    "dom.js",
    "data.js",
    "format.js",
    "charts.js",
    "metrics.js",
    "run_sections.js",
    "run.js",
    "drawing.js",
    "tokens.js",
    "text.js",
    "trees.js",
    "keys.js",
    "theme.js",
    "main.js",
)
"""In an order in which each module comes after those that it imports."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:class|const|let|function|async function) )", re.MULTILINE)


def static_file(name: str) -> tuple[str, str] | None:
    """Return text and media type of a file of the page, None if there is no such file."""
    if name not in ("index.html", "style.css", *MODULES):
        return None
    return _text(name), f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"


def single_page(data: bytes) -> str:
    """Return the page as one HTML text that loads nothing.

    Args:
        data: JSON of the answers by address, without `<`.

    The modules become one script: their names do not clash, so import and export lines can be dropped. The content
    security policy allows only this script and this style, by their digests.
    """
    style = _text("style.css")
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", _text(name))) for name in MODULES)
    if "</script" in script or "</style" in style:
        raise AssertionError("the page's own files must not contain a closing script or style tag")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="data">{data.decode()}</script>'
    )
    page = re.sub(r"<link [^>]*stylesheet[^>]*>", lambda _: head, _text("index.html"))
    return re.sub(r"<script [^>]*main\.js[^>]*></script>", lambda _: f'<script type="module">{script}</script>', page)


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
