"""Helpers for the connection between trainer rank 0 and the rollout process."""

import asyncio
import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

_INTERVAL_S = 0.1


class Outbox:
    """Sends messages from a thread, so that a slow reader at the other end delays no tree."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._messages: SimpleQueue[object] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queue a message and return at once; messages are sent in this order."""
        self._messages.put(message)

    async def sent(self) -> None:
        """Wait until all messages so far are sent, or the other end is gone."""
        reached = threading.Event()
        self._messages.put(reached)
        await asyncio.to_thread(reached.wait)

    def close(self) -> None:
        """Wait until all messages are sent, or the other end is gone."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            if isinstance(message, threading.Event):
                message.set()
                continue
            with suppress(OSError):  # the other end is gone; the reader of this connection notices
                self._connection.send(message)


def hang_up(connection: "Connection[Any, Any]") -> None:
    """Shut a connection down while another thread waits for a message."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def connect(address: Path, patience_s: float, closed: threading.Event) -> "Connection[Any, Any]":
    """Wait until a process listens at a socket; return the connection to it.

    Raises:
        OSError: none has listened for `patience_s` seconds, or `closed` is set.
    """
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return Client(str(address), "AF_UNIX")
        except OSError:
            if closed.wait(_INTERVAL_S) or time.monotonic() > give_up:
                raise
