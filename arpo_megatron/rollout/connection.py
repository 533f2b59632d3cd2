"""The two ends of the connection between trainer rank 0 and the rollout process (see `service`)."""

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


class Outbox:
    """Sends from a thread, so that a busy reader at the other end delays no tree."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._messages: SimpleQueue[object] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Returns at once; messages arrive in this order."""
        self._messages.put(message)

    def close(self) -> None:
        """Returns when everything is sent, or nobody reads any more."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:  # the other end is gone: whoever reads notices
                return


def hang_up(connection: "Connection[Any, Any]") -> None:
    """End a connection in which another thread waits."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
