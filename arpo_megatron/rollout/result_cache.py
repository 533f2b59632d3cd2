"""Results of deterministic tools, shared by the trees of a task: an equal call is executed once.

The paths of one tree share more: see `TreeClient.call_tool`.

A result is that of a call with equal arguments and an equal state. The state of a python call with sessions is what the
earlier python calls of its path have left, so their programs are part of the key, and name the state.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tools_sandbox.client import ToolAnswer

_ENTRIES = 50_000
SHARED_STATUSES = ("ok", "error")
"""Statuses of answers that equal calls share; others may differ in the next execution."""


def history_digest(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return a name for calls with these arguments, in their order, and for the state that they leave."""
    return hashlib.sha256(json.dumps([dict(each) for each in calls], sort_keys=True).encode()).hexdigest()[:32]


class ResultCache:
    """Answers by key, those in flight included. Belongs to one event loop."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, asyncio.Task[ToolAnswer]] = OrderedDict()

    async def answer(self, key: str, execute: Callable[[], Awaitable[ToolAnswer]]) -> tuple[ToolAnswer, bool]:
        """Return the answer to a call, and whether an equal call has executed it.

        A call that fails or runs into its time limit is not shared here.

        Raises:
            SandboxError: `execute` raised it.
        """
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)  # before the wait, in which it may be evicted
            await asyncio.wait([known])
            if not known.cancelled() and known.exception() is None and known.result().status in SHARED_STATUSES:
                return known.result(), True
        # A task of its own, which continues for the others if this path is stopped.
        task = asyncio.ensure_future(execute())
        self._answers[key] = task
        if len(self._answers) > _ENTRIES:
            self._answers.popitem(last=False)
        return await asyncio.shield(task), False
