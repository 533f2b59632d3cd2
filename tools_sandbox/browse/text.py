"""Conversion of a page's bytes to text that a model can read. Runs in a parsing process, see `parser`."""

from __future__ import annotations

import codecs
import html
import json
import logging
import re
from typing import Any

import charset_normalizer
import trafilatura

from tools_sandbox.browse.page import FetchFailed, Page

logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # malformed pages are normal and need no log lines

_HTML = frozenset({"text/html", "application/xhtml+xml"})
_TEXT = frozenset({"application/json", "application/xml", "application/ld+json", "application/javascript"})
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]{0,200}>(.{0,1000}?)</title", re.IGNORECASE | re.DOTALL)
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_DETECTION_BYTES = 1 << 16


def answer(page: dict[str, Any], max_chars: int) -> None:
    """Print the text of a page as JSON: {"text": its beginning, "chars": its length}, or {"failed", "lasting"}.

    page: fields of a `Page`. max_chars: longest beginning in characters.
    """
    found: dict[str, Any]
    try:
        text = readable(Page(**page)).strip()
        found = {"text": text[:max_chars], "chars": len(text)}
    except FetchFailed as error:
        found = {"failed": str(error), "lasting": error.lasting}
    print(json.dumps(found))


def readable(page: Page) -> str:
    """Return the text of a page; for HTML, its main content. Raises FetchFailed if there is no text."""
    text = decode(page)
    if page.content_type in _HTML or (not page.content_type and "<html" in text[:1000].lower()):
        return _main_content(page, text)
    if page.content_type.startswith("text/") or page.content_type in _TEXT or page.content_type.endswith("+xml"):
        return text
    if not page.content_type and "\0" not in text:
        return text
    raise FetchFailed(f"{page.url} is no text but {page.content_type or 'bytes'}.", lasting=True)


def decode(page: Page) -> str:
    """Return the body as text: by its byte-order mark, as UTF-8, as declared, or by detection. Never fails.

    UTF-8 comes before the declared charset: text in another encoding is hardly ever valid UTF-8, and declarations are
    often wrong.
    """
    body = page.body
    for mark, name in _BYTE_ORDER_MARKS.items():
        if body.startswith(mark):
            return body.decode(name, "replace")
    # A body that was cut may end inside a character.
    whole = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        return whole.decode(body, final=not page.cut)
    except UnicodeDecodeError:
        pass
    found = _META_CHARSET.search(body[:4096])
    for declared in (page.charset, found.group(1).decode("ascii") if found else None):
        decoded = _try_decode(body, declared) if declared else None
        if decoded is not None:
            return decoded
    guess = charset_normalizer.from_bytes(body[:_DETECTION_BYTES]).best()
    return body.decode(guess.encoding if guess else "utf-8", "replace")


def _try_decode(body: bytes, name: str) -> str | None:
    try:
        return body.decode(name)  # raises for codecs that are not text encodings, such as "zip"
    except (LookupError, ValueError):
        return None


def _main_content(page: Page, text: str) -> str:
    found = trafilatura.extract(text, url=page.url, include_comments=False, favor_recall=True)
    found = found or trafilatura.html2txt(text)
    if not found or not found.strip():
        raise FetchFailed(f"{page.url} holds no readable text.", lasting=True)
    title = _TITLE.search(text[:_DETECTION_BYTES])
    heading = " ".join(html.unescape(title.group(1)).split()) if title else ""
    return f"{heading}\n\n{found}" if heading and not found.startswith(heading) else str(found)
