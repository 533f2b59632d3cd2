"""The choice of an engine for a request: rendezvous hashing of routing keys over the engines that are up.

Each pair of key and engine has a hash, and a key belongs to the engine with the largest one (Thaler and Ravishankar,
1998). When an engine is down, only its own keys move, each to its second-best engine; they return when it is back. No
state is shared, so every process picks the same engine for a key.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""SGLang's router (policy `manual`) sends all requests with the same value of this header to one engine."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
_LEAVE_S = 30.0
"""Seconds for which a tree leaves an engine that failed one of its requests several times in a row. A return may cost
as many failures again, so a tree needs time for a few segments."""
_STRIKES = 3
"""Failures of one request in a row after which its tree leaves the engine, although its server answers."""

CacheId = tuple[str, str | None, int]
"""Identity of a radix cache's content: the engine's URL, its incarnation, the pushes so far. A restart empties the
cache, and so does a push. A failed request does not. If pushes leave the cache as it is, the last number is that of the
policy for whose trees this part of the cache is."""


@dataclass(slots=True, eq=False)
class EngineState:
    """State of one engine as a client knows it.

    A client of a router does not know which engine answers. It has one state for each routing key, because a router
    sends the requests of one key to one engine.
    """

    url: str
    """http://host:port of the engine or the router."""
    backoff_until: float = 0.0
    """Time on the event loop's clock, in seconds, before which no request is sent."""
    backoff_s: float = FIRST_BACKOFF_S
    """Length of the next backoff."""
    suspect: bool = False
    """It has failed and not answered since, so it may be a restarted process with older weights."""
    incarnation: str | None = None
    """The process that answered last: the value of `INCARNATION_HEADER`, "" if the answer had none. None: it is not
    known which process, if any, answers the next request."""

    def record_failure(self, now: float) -> bool:
        """Start a backoff, twice as long as the one before; False if one is running (many requests fail at once)."""
        self.suspect = True
        if now < self.backoff_until:
            return False
        self.backoff_until = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)
        return True

    def rest_s(self, reason: str, *, stale: bool, strikes: int, now: float, probed: bool) -> float:
        """Return the seconds before a failed request is repeated; start a backoff if the engine itself has failed.

        The cause of a failed request may be that request, so others continue: a tree that moves computes its prefixes
        again elsewhere. A timeout is a sign of load.

        Args:
            reason: why it failed; "connection" if there was no answer.
            stale: the engine has old weights.
            strikes: failures of the request in a row.
            now: time on the event loop's clock.
            probed: before the next request, the engine is asked which process serves it.
        """
        if reason == "timeout":
            return 0.0
        if reason == "connection" and (strikes > 1 or not probed):
            self.incarnation = None
        if self.incarnation and not stale:
            self.suspect = self.suspect or reason == "connection"
            return min(FIRST_BACKOFF_S * float(2 ** (strikes - 1)), MAX_BACKOFF_S)
        self.record_failure(now)
        return 0.0

    def record_answer(self) -> None:
        """End the backoff: the engine is up and serves the expected weights."""
        self.suspect, self.backoff_until, self.backoff_s = False, 0.0, FIRST_BACKOFF_S


def is_same_cache(before: CacheId, after: CacheId) -> bool:
    """Return whether an answer came from the cache `after`, given what was known before and after it.

    A process that was not known before the answer is the one that is known after it.
    """
    url, incarnation, pushes = after
    return before == after or (before == (url, None, pushes) and incarnation is not None)


def pick_engine(key: str, engines: Sequence[EngineState], now: float) -> EngineState:
    """Return the engine of `key` among those not in backoff; if all are, the one whose backoff ends first."""
    ready = [engine for engine in engines if engine.backoff_until <= now]
    if not ready:
        return min(engines, key=lambda engine: engine.backoff_until)
    return max(ready, key=lambda engine: hashlib.blake2b(f"{key} {engine.url}".encode(), digest_size=8).digest())


class EngineRoutes:
    """The engine of each routing key: where it was placed, or its best one by hash, or a router that decides.

    Args:
        urls: http://host:port of each engine.
        router: URL of SGLang's router, if there is one.
    """

    def __init__(self, urls: Sequence[str], router: str | None) -> None:
        self.engines = tuple(EngineState(url.rstrip("/")) for url in urls)
        self.router = None if router is None else router.rstrip("/")
        self._placed: dict[str, EngineState] = {}  # by key: the engine that `pin` has chosen
        self._routed: dict[str, EngineState] = {}  # by key: the router sends different keys to different engines
        self._left: dict[str, tuple[EngineState, float]] = {}  # by key: an engine that fails its requests, until when
        self._bypass: set[str] = set()  # keys that the router sends to an engine with old weights

    def pick(self, key: str, now: float) -> EngineState:
        """Return the engine, or the router's state, for a request that is sent now."""
        if self.router is None or key in self._bypass:
            left, until = self._left.get(key, (None, 0.0))
            ready = [engine for engine in self.engines if engine.backoff_until <= now]
            engines = [engine for engine in ready if engine is not left or until <= now] or self.engines
            placed = self._placed.get(key)
            if placed is not None and placed in engines and placed.backoff_until <= now:
                return placed
            return pick_engine(key, engines, now)
        return self._routed.setdefault(key, EngineState(self.router))

    def rest_s(self, key: str, engine: EngineState, reason: str, *, stale: bool, strikes: int, now: float) -> float:
        """Return the seconds before a failed request is repeated, as `EngineState.rest_s`.

        After some failures in a row the requests with its key leave the engine for a while. Those of other keys stay:
        the cause may be this request.
        """
        own = engine in self.engines
        if own and not stale and reason not in ("timeout", "connection") and strikes % _STRIKES == 0:
            self._left[key] = engine, now + _LEAVE_S
        return engine.rest_s(reason, stale=stale, strikes=strikes, now=now, probed=own)

    def pin(self, key: str, url: str | None) -> None:
        """Send requests with this key to one engine while it is up; None: to any."""
        engine = next((engine for engine in self.engines if engine.url == url), None)
        if engine is None:
            self._placed.pop(key, None)
        else:
            self._placed[key] = engine

    def bypass_router(self, key: str) -> bool:
        """Send requests with this key directly to engines until `pushed`, each of which may have old weights.

        Returns False if they are sent directly already.
        """
        if key in self._bypass:
            return False
        self._bypass.add(key)
        for engine in self.engines:
            engine.suspect = True
        return True

    def pushed(self) -> None:
        """Note that all engines have the same weights."""
        self._bypass.clear()
        self._left.clear()
        self._routed.clear()
