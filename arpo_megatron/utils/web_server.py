"""A web server that a command runs, and that signals end in order."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class CommandServer(uvicorn.Server):
    """uvicorn's server without handlers of its own: the command calls `end` for a signal (`interrupts_call`).

    uvicorn handles SIGINT and SIGTERM only, and its second one prints a traceback of every answer in progress.
    """

    def end(self) -> None:
        """End, from any thread or a handler. The first call lets answers in progress finish, the second does not."""
        if self.should_exit:
            logging.getLogger("uvicorn.error").disabled = True
            self.force_exit = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command."""
        yield
