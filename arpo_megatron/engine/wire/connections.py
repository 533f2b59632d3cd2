"""Connections between two processes of a machine, each of which proves that it knows a key.

Both ends unpickle what they receive. `multiprocessing` has the proof; here it also has a deadline, so that neither end
waits for a process that connects, or listens, and sends nothing.
"""

import multiprocessing.connection as mp
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError

_ADDRESS = "127.0.0.1"
_HANDSHAKE_S = 30


def connect(port: int, key: str) -> mp.Connection:
    """Return a connection to the `Listener` at a port of this machine.

    Raises:
        OSError: nothing listens, or nothing answers in time.
        EOFError: the other end has closed the connection.
        AuthenticationError: the other end does not know the key.
    """
    connection = mp.Client((_ADDRESS, port))
    with _read_deadline(connection):
        mp.answer_challenge(connection, key.encode())
        mp.deliver_challenge(connection, key.encode())
    return connection


class Listener:
    """Accepts a connection of a process that knows the key.

    Every process that connects is asked for the proof in a thread of its own, so a silent one delays no other.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._listener = mp.Listener((_ADDRESS, 0))
        self._closing = False
        self._found: queue.Queue[mp.Connection] = queue.Queue()
        self._thread = threading.Thread(target=self._accept, name="weight-listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """TCP port on the loopback address."""
        return int(self._listener.address[1])

    def connection(self, timeout_s: float) -> mp.Connection:
        """Return the connection. Raises OSError if there is none in time."""
        try:
            return self._found.get(timeout=timeout_s)
        except queue.Empty:
            raise OSError(f"no connection for {timeout_s:g} s") from None

    def close(self) -> None:
        """Stop listening. A connection that has been accepted stays open."""
        self._closing = True
        socket.create_connection(self._listener.address).close()  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            with suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._ask, args=(connection,), name="weight-key", daemon=True).start()

    def _ask(self, connection: mp.Connection) -> None:
        with suppress(AuthenticationError, EOFError, OSError), _read_deadline(connection):  # a stranger
            mp.deliver_challenge(connection, self._key)
            mp.answer_challenge(connection, self._key)
            self._found.put(connection)


@contextmanager
def _read_deadline(connection: mp.Connection) -> Iterator[None]:
    """Have reads fail when nothing comes for some time."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_S, 0))
        yield
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
