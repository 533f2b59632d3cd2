"""From the bytes of a page to text that a model can read."""

from __future__ import annotations

import codecs
import html
import logging
import re

import charset_normalizer

from tools_sandbox.browse.fetch import FetchFailed, Page

logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # pages are bad in every way; that is no event

_HTML = frozenset({"text/html", "application/xhtml+xml"})
_TEXT = frozenset({"application/json", "application/xml", "application/ld+json", "application/javascript"})
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]{0,200}>(.{0,1000}?)</title", re.IGNORECASE | re.DOTALL)
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_SNIFFED_BYTES = 1 << 16


def readable(page: Page) -> str:
    """The text of a page; of HTML its main content. FetchFailed: it is no text, or there is none in it."""
    text = decode(page)
    if page.content_type in _HTML or (not page.content_type and "<html" in text[:1000].lower()):
        return _main_content(page, text)
    if page.content_type.startswith("text/") or page.content_type in _TEXT or page.content_type.endswith("+xml"):
        return text
    if not page.content_type and "\0" not in text:
        return text
    raise FetchFailed(f"{page.url} is no text but {page.content_type or 'bytes'}.", lasting=True)


def decode(page: Page) -> str:
    """The body as text: by its byte-order mark, as UTF-8, as declared, as its bytes look; never an error.

    UTF-8 comes before what is declared, since text in another encoding is hardly ever valid UTF-8, and declarations
    are often wrong.
    """
    body = page.body
    for mark, name in _MARKS.items():
        if body.startswith(mark):
            return body.decode(name, "replace")
    # What was cut may end inside a character.
    whole = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        return whole.decode(body, final=not page.cut)
    except UnicodeDecodeError:
        pass
    found = _META_CHARSET.search(body[:4096])
    for declared in (page.charset, found.group(1).decode("ascii") if found else None):
        decoded = _decoded(body, declared) if declared else None
        if decoded is not None:
            return decoded
    guess = charset_normalizer.from_bytes(body[:_SNIFFED_BYTES]).best()
    return body.decode(guess.encoding if guess else "utf-8", "replace")


def _decoded(body: bytes, name: str) -> str | None:
    try:
        return body.decode(name)  # refuses what is no text encoding, such as "zip"
    except (LookupError, ValueError):
        return None


def _main_content(page: Page, text: str) -> str:
    import trafilatura

    found = trafilatura.extract(text, url=page.url, include_comments=False, favor_recall=True)
    found = found or trafilatura.html2txt(text)
    if not found or not found.strip():
        raise FetchFailed(f"{page.url} holds no readable text.", lasting=True)
    title = _TITLE.search(text[:_SNIFFED_BYTES])
    heading = " ".join(html.unescape(title.group(1)).split()) if title else ""
    return f"{heading}\n\n{found}" if heading and not found.startswith(heading) else str(found)
