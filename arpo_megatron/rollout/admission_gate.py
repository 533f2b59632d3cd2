"""Holds the engine requests of paths until `KvAdmission` grants them."""

import asyncio
import itertools
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.request import EngineRefusedError
from arpo_megatron.rollout.admission import KvAdmission
from arpo_megatron.rollout.admission_state import AdmissionFigures, PathId
from arpo_megatron.rollout.node import Node
from arpo_megatron.tasks.protocols.base import TextCodec
from arpo_megatron.tree import Role

SPARE_REQUESTS = 1.125
"""Requests sent to an engine over those that it runs: the next ones are there when some end."""

_PROBE_TOKENS = (16, 1024)
"""Prefixes whose prefill is timed when the gate opens; the difference excludes the fixed cost of a request."""
_PROBE_TEXT = "What is 20 + 31? Look up the answer, then compute it in 4 steps; w5 w6 w7 w8 w9"
"""Text whose tokens, drawn at random, are the prefixes: any other ids could be missing in a small vocabulary."""
_UNLIMITED = EngineCapacity(tokens=2**50, requests=2**40)


@dataclass(slots=True)
class RequestSlot:
    """A request that may be sent, and what its sender reports after the answer."""

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


class AdmissionGate:
    """One for all trees of a session, in one event loop. Use as `async with`.

    Requests wait until an engine is up and reports what it can hold. If engines do not report it, all requests pass.

    Args:
        engine: client of the engines.
        codec: the tokenizer, for prefixes whose prefill is timed. None: paths are never released.
    """

    def __init__(self, engine: EngineClient, codec: TextCodec | None = None) -> None:
        self.engine = engine
        self._probe_ids = [] if codec is None else sorted(set(codec.encode(_PROBE_TEXT)))
        self.admission = KvAdmission()
        self.waiting: dict[PathId, asyncio.Future[int]] = {}
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

    async def opened(self) -> None:
        """Wait until engines have reported what they can hold, and the times of prefills are known."""
        if self._opening is None:
            raise RuntimeError("AdmissionGate is used outside `async with`")
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        capacities = await self.engine.capacities()
        rebuild_s = math.inf
        if capacities:
            tokens = sum(each.tokens for _, each in capacities) / len(capacities)
            rebuild_s = tokens * await self._prefill_s(int(tokens))
            if math.isinf(rebuild_s) and self._probe_ids:
                why = "the time in which an engine computes its KV pool cannot be measured"
                print(f"{why}: paths that wait for a tool keep their room", file=sys.stderr, flush=True)
        else:
            why = "an engine does not report its KV pool (/server_info), or none is up"
            print(f"{why}: all paths are admitted at once", file=sys.stderr, flush=True)
            capacities = [("", _UNLIMITED)]
        self.urls = [url for url, _ in capacities]
        self.admission.set_capacities(
            [replace(each, requests=int(each.requests * SPARE_REQUESTS) + 1) for _, each in capacities], rebuild_s
        )
        self.grant()

    async def _prefill_s(self, tokens: int) -> float:
        """Return the seconds in which an idle engine with a pool of `tokens` computes a prompt token.

        It is infinite if an engine does not compute the probes, or the longer one takes no more time than the shorter.
        """
        if len(self._probe_ids) < 2:
            return math.inf
        clock, draw = asyncio.get_running_loop().time, np.random.default_rng()
        small, large = (min(length, tokens // 4) for length in _PROBE_TOKENS)
        best = {small: math.inf, large: math.inf}
        try:
            for length in 2 * (small, large):  # the first of each warms the engine up
                began = clock()
                await self.engine.prefill(draw.choice(self._probe_ids, length).astype(np.int32))
                best[length] = min(best[length], clock() - began)
        except (EngineRefusedError, EngineUnavailableError):
            return math.inf
        longer_s = best[large] - best[small]
        return longer_s / (large - small) if large > small and longer_s > 0.0 else math.inf

    def tree(self, routing_key: str, prompt: int, longest: int) -> "TreeAdmission":
        """Return the admission of a new tree, which is younger than all before it; `KvAdmission.add_tree` has more."""
        number = next(self._numbers)
        self.admission.add_tree(number, prompt, longest)
        return TreeAdmission(self, number, routing_key)

    def flushed(self) -> None:
        """Note that all caches are empty, after a push."""
        self.admission.flushed()

    def figures(self) -> AdmissionFigures:
        """Return the figures of all trees and engines."""
        return self.admission.figures()

    def grant(self) -> None:
        """Wake the requests that may be sent now."""
        for path, engine in self.admission.grant():
            waiting = self.waiting.get(path)
            if waiting is None or waiting.done():  # it was cancelled
                self.admission.answered(engine, *path, 0, None)
            else:
                waiting.set_result(engine)


class TreeAdmission:
    """Lets the requests of one tree wait until the admission grants them."""

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
        self._gate.engine.pin(self._routing_key, None)
        self._gate.grant()

    @contextmanager
    def tool_call(self, node: Node) -> Iterator[None]:
        """Note that the path of a segment waits for a tool during the block."""
        gate, key, began = self._gate, path_of(node.key), time.monotonic()

        def release() -> None:
            gate.admission.release(self._number, key)
            gate.grant()

        patience_s, timer = gate.admission.patience_s, None
        if math.isfinite(patience_s):
            timer = asyncio.get_running_loop().call_later(patience_s, release)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            gate.admission.tool_answered(time.monotonic() - began)

    @asynccontextmanager
    async def turn(self, node: Node, length: int) -> AsyncIterator[RequestSlot]:
        """Wait until a request for a segment, with a prompt of `length` tokens, may be sent; the block sends it."""
        gate, key = self._gate, path_of(node.key)
        path = (self._number, key)
        waiting = gate.waiting[path] = asyncio.get_running_loop().create_future()
        turn, asked = RequestSlot(length), time.monotonic()
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
            del gate.waiting[path]
        gate.engine.pin(self._routing_key, gate.urls[engine])
        turn.waited_s = time.monotonic() - asked
        try:
            yield turn
        finally:
            turn.recomputed = gate.admission.answered(engine, *path, turn.length, turn.cached)
            gate.grant()


def path_of(key: PathKey) -> PathKey:
    """Return the id of the path to which a segment belongs: a path continues at the first child."""
    end = len(key)
    while end > 1 and not key[end - 1]:
        end -= 1
    return key[:end]
