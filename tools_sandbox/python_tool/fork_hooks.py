"""Hooks that modules register with `os.register_at_fork`, deferred to the process that runs foreign code.

A call takes three forks: supervisor, init, worker. `random` and `threading` run a hook after each fork, which costs a
tenth of a call although only the worker needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_register = os.register_at_fork
_deferred: list[dict[str, Callable[[], object]]] = []


def defer() -> None:
    """Keep the hooks of modules that are imported from now on from running, until `run_deferred`."""
    os.register_at_fork = lambda **hooks: _deferred.append(hooks)


def run_deferred() -> None:
    """Run the deferred hooks once, as the fork of this process would have, and register them for its own forks."""
    os.register_at_fork = _register
    for hooks in _deferred:
        _register(**hooks)
    for hooks in reversed(_deferred):
        hooks.get("before", _nothing)()
    for hooks in _deferred:
        hooks.get("after_in_child", _nothing)()


def _nothing() -> None:
    pass
