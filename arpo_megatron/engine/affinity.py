"""Which engine a request goes to: the trees' routing keys, divided among the engines that are up.

Rendezvous hashing (Thaler and Ravishankar, 1998): each pair of key and engine has a weight, and a key belongs to the
engine of the largest one. Where an engine is down, only its own keys move, each to its second-best engine, and they
come back with it. No state is shared, so every process finds the same place for a key.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""SGLang's router (policy `manual`) sends all requests with the same value of this header to one engine."""
Cache = tuple[str, int, int]
"""What an engine holds of prefixes: its URL, how often it has failed, how often caches were emptied for a push."""
FIRST_REST_S = 0.1
LONGEST_REST_S = 5.0


@dataclass(slots=True)
class EngineState:
    """What a client knows of one engine.

    Attributes:
        url: http://host:port.
        rests_until: on the event loop's clock, in seconds; no request is sent before.
        rest_s: length of the next rest.
        suspect: it has failed and not answered since, so it may be another process with other weights.
        failures: how often it was given a rest; each time its cache may have been lost.
    """

    url: str
    rests_until: float = 0.0
    rest_s: float = FIRST_REST_S
    suspect: bool = False
    failures: int = 0

    def failed(self, now: float) -> bool:
        """Let it rest, twice as long as the time before; False: it rests already (many requests fail at once)."""
        self.suspect = True
        if now < self.rests_until:
            return False
        self.failures += 1
        self.rests_until = now + self.rest_s
        self.rest_s = min(2 * self.rest_s, LONGEST_REST_S)
        return True

    def answered(self) -> None:
        """It is up, and serves what it should."""
        self.suspect, self.rests_until, self.rest_s = False, 0.0, FIRST_REST_S


def place(key: str, engines: Sequence[EngineState], now: float) -> EngineState:
    """The engine of `key` among those that do not rest; where all do, the one whose rest ends first."""
    awake = [engine for engine in engines if engine.rests_until <= now]
    if not awake:
        return min(engines, key=lambda engine: engine.rests_until)
    return max(awake, key=lambda engine: hashlib.blake2b(f"{key} {engine.url}".encode(), digest_size=8).digest())
