"""A connection of the service: uvicorn's, with a deadline for the headers of every request."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

_HEADERS_S = 30.0


class Connection(H11Protocol):
    """A connection that is cut if the headers of a request do not arrive in time.

    The time of the first request begins with the connection, that of a later one with its first byte: until then the
    limit of an idle connection holds.
    """

    headers_s: ClassVar[float] = _HEADERS_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to wait for the headers of the first request."""
        super().connection_made(transport)
        self._idle = self.conn.their_state  # the state until headers are complete, also of a later request
        self._deadline = self.loop.call_later(self.headers_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived. It may end with incomplete headers."""
        super().handle_events()
        if self.conn.their_state is not self._idle:
            self._forget_deadline()
        elif self._deadline is None and self.conn.trailing_data[0]:
            self._deadline = self.loop.call_later(self.headers_s, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
