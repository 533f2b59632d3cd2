"""Importing this module loads everything that parses pages, also what the library loads late, by parsing an article."""

from tools_sandbox.browse.page import Page
from tools_sandbox.browse.text import readable

_ARTICLE = b"<html><body><article><p>" + b"This is a sentence of an article. " * 50 + b"</p></article></body></html>"

readable(Page("http://localhost/", "text/html", None, _ARTICLE, cut=False))
