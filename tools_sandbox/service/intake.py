"""The intake of requests: a caller is authorized by headers alone, and its body is read within bounds of time and size.

A caller without the token costs the headers of its request. The body of a call counts from its arrival until the call
is answered, so the bounds also hold for the calls that wait.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from contextlib import suppress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_BODY_BYTES = 8 << 20
_BODY_S = 10.0
"""Seconds from the headers of a request to the end of its body."""
_MAX_PEER_BYTES = 256 << 20
"""Bodies of the unanswered calls from one address. On one machine all callers have the same address."""
_MAX_BYTES = 512 << 20
"""Bodies of all unanswered calls."""
_OPEN = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that need no token."""
_WITH_BODY = "/call"
"""The only path whose requests have a body."""


class _Refused(Exception):  # noqa: N818 - an answer
    """The request gets an HTTP error."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


class Intake:
    """Middleware that passes on authorized requests, each with its whole body. Belongs to one event loop.

    token: bearer token that callers need. None: everyone may call.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        *,
        body_s: float = _BODY_S,
        max_peer_bytes: int = _MAX_PEER_BYTES,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._body_s, self._max_peer_bytes, self._max_bytes = body_s, max_peer_bytes, max_bytes
        self._held: Counter[str] = Counter()
        """Bytes of the bodies of unanswered calls, by address of the caller."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            headers = dict(scope["headers"])
            self._check_token(scope["path"], headers)
            if scope["path"] == _WITH_BODY:
                _check_length(headers)
                return await self._pass_on_with_body(scope, receive, send)
        except _Refused as error:
            return await self._refuse(error, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _refuse(self, error: _Refused, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then discard the rest of the body for a while, and close the connection.

        If it were closed at once, a caller that is still sending would see that and not the reason.
        """
        response = JSONResponse({"detail": str(error)}, error.status, {**(error.headers or {}), "Connection": "close"})
        await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # Chunks are not read: parsing those of one byte would keep the event loop busy for as long as a caller likes.
        chunked = b"transfer-encoding" in dict(scope["headers"])
        with suppress(TimeoutError):
            async with asyncio.timeout(self._body_s):
                while not chunked and (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check_token(self, path: str, headers: dict[bytes, bytes]) -> None:
        actual = headers.get(b"authorization", b"")
        if path not in _OPEN and self._expected is not None and not hmac.compare_digest(actual, self._expected):
            raise _Refused(401, "missing or wrong bearer token", {"WWW-Authenticate": "Bearer"})

    async def _pass_on_with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope["client"] else ""
        chunks = list[bytes]()
        try:
            await self._read(receive, address, chunks)
            chunks[:] = [b"".join(chunks)]
            await self._app(scope, _replay(chunks[0], receive), send)
        finally:
            self._held[address] -= sum(map(len, chunks))
            if not self._held[address]:
                del self._held[address]

    async def _read(self, receive: Receive, address: str, chunks: list[bytes]) -> None:
        """Add a whole body to `chunks`, and count it for its caller. Raises _Refused."""
        more = True
        try:
            async with asyncio.timeout(self._body_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Refused(499, "the caller has gone")
                    chunks.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    self._held[address] += len(chunks[-1])
                    if self._held[address] > self._max_peer_bytes or self._held.total() > self._max_bytes:
                        raise _Refused(429, "the waiting calls are too large together", {"Retry-After": "1"})
        except TimeoutError as error:
            reason = f"the body did not arrive within {self._body_s:g} s"
            raise _Refused(408, reason) from error


def _check_length(headers: dict[bytes, bytes]) -> None:
    """Raises _Refused for a body that is too large, or whose length is not given."""
    wanted = f"the body may have at most {_MAX_BODY_BYTES} bytes, and its length must be given"
    if b"transfer-encoding" in headers:
        raise _Refused(411, wanted)
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
        raise _Refused(413, wanted)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns the body, then what `receive` returns."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
