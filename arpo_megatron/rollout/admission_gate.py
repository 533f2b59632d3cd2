"""Holds the engine requests of paths until `KvAdmission` grants them."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.rollout.admission import AdmissionFigures, KvAdmission, PathId
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Role

_SPARE_REQUESTS = 1.125
"""Requests sent to an engine over those that it runs: the next ones are there when some end."""

_UNLIMITED = EngineCapacity(tokens=2**50, requests=2**40)


@dataclass(slots=True)
class Turn:
    """A request that was granted."""

    length: int
    """Tokens from the root to the end of the path after the answer; its user sets it."""
    cached: int | None = None
    """Cached tokens of the prompt; its user sets it if there is an answer."""
    recomputed: int = 0
    """Tokens that the engine computed again, known after the block."""
    suspended: bool = False
    """The path was not resident any more when it asked."""
    waited_s: float = 0.0
    """Seconds until it was granted."""
    seconds: float = 0.0
    """Seconds of the block, known after it."""


class AdmissionGate:
    """One for all trees of a session, in one event loop. Use as `async with`.

    Requests wait until an engine is up and reports what it can hold. If engines do not report it, all requests pass.

    Args:
        engine: client of the engines.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.admission = KvAdmission()
        self.granted: dict[PathId, asyncio.Future[int]] = {}
        self.urls: list[str] = []
        self._numbers = itertools.count()
        self._opening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._opening = asyncio.create_task(self._open())
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _open(self) -> None:
        capacities = await self.engine.capacities() or [("", _UNLIMITED)]
        self.urls = [url for url, _ in capacities]
        self.admission.set_capacities(
            [replace(each, requests=int(each.requests * _SPARE_REQUESTS) + 1) for _, each in capacities]
        )
        self.grant()

    def tree(self, routing_key: str, prompt: int, longest: int) -> "TreeAdmission":
        """Return the admission of a new tree, which is younger than all before it; `KvAdmission.add_tree` has more."""
        number = next(self._numbers)
        self.admission.add_tree(number, prompt, longest)
        return TreeAdmission(self, number, routing_key)

    def flushed(self) -> None:
        """Note that all caches are empty, after a push."""
        self.admission.flushed()

    def figures(self) -> AdmissionFigures:
        """Return the figures of now."""
        return self.admission.figures()

    def grant(self) -> None:
        """Wake the requests that may be sent now."""
        for path, engine in self.admission.grant():
            waiting = self.granted.get(path)
            if waiting is None or waiting.done():  # it was cancelled
                self.admission.answered(engine, *path, 0, None)
            else:
                waiting.set_result(engine)


class TreeAdmission:
    """Admission of one tree's paths."""

    def __init__(self, gate: AdmissionGate, number: int, routing_key: str) -> None:
        self._gate = gate
        self._number = number
        self._routing_key = routing_key

    def add_path(self, node: Node) -> None:
        """Add a path that starts with a MODEL segment."""
        above = node.parent
        parent = None if above is None or above.role is Role.PROMPT else path_of(above.key)
        start = 0 if above is None else above.path_length()
        self._gate.admission.add_path(self._number, path_of(node.key), parent, start)

    def end_path(self, node: Node) -> None:
        """Note that the path with this segment has ended."""
        self._gate.admission.end(self._number, path_of(node.key))
        self._gate.grant()

    def close(self) -> None:
        """Remove the tree, whose paths have all ended or were cancelled."""
        self._gate.admission.remove_tree(self._number)
        self._gate.engine.place(self._routing_key, None)
        self._gate.grant()

    @asynccontextmanager
    async def turn(self, node: Node, length: int) -> AsyncIterator[Turn]:
        """Wait until a request for a segment, with a prompt of `length` tokens, may be sent; the block sends it."""
        gate, key = self._gate, path_of(node.key)
        path = (self._number, key)
        waiting = gate.granted[path] = asyncio.get_running_loop().create_future()
        turn, asked = Turn(length), time.monotonic()
        turn.suspended = gate.admission.ask(*path, length)
        gate.grant()
        try:
            engine = await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # granted at the same moment
                gate.admission.answered(waiting.result(), *path, length, None)
                gate.grant()
            raise
        finally:
            del gate.granted[path]
        gate.engine.place(self._routing_key, gate.urls[engine])
        turn.waited_s = time.monotonic() - asked
        try:
            yield turn
        finally:
            turn.seconds = time.monotonic() - asked - turn.waited_s
            turn.recomputed = gate.admission.answered(engine, *path, turn.length, turn.cached)
            gate.grant()


def path_of(key: PathKey) -> PathKey:
    """Return the id of the path to which a segment belongs: a path continues at the first child."""
    end = len(key)
    while end > 1 and not key[end - 1]:
        end -= 1
    return key[:end]
