"""A page, and the failure to get one. Imports only the standard library: parsing processes load it, too."""

from __future__ import annotations

from dataclasses import dataclass


class FetchFailed(Exception):  # noqa: N818 - an outcome
    """There is no page. The message is for the model. lasting: a repeated call would fail too."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the server sent it."""

    url: str
    """Address after redirects."""
    content_type: str
    """Content type in lower case without parameters; empty if the server sent none."""
    charset: str | None
    """Charset that the server declared."""
    body: bytes
    """Body after decompression."""
    cut: bool
    """True if the body is incomplete: cut at the limit, or compressed data that ends early."""
