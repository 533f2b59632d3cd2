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
