"""Processes that never outlive the one that started them, however that one ends."""

import os
import threading
import time
from collections.abc import Callable

_WATCH_INTERVAL_S = 0.5


def watch_parent(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call `on_death` from a thread as soon as this process is no longer a child of `parent_pid`.

    PR_SET_PDEATHSIG would do for a parent that starts its children from its main thread, but it fires when the
    starting THREAD ends.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_INTERVAL_S)
        on_death()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
