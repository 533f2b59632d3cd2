"""The trees that send requests: the part of the cache that each uses, and its priority in an engine's queue."""

from itertools import islice
from typing import Any

PRIORITIES = 32
"""Number of priorities, from 0 on. SGLang's metrics have a label for each, so all younger trees share the last one."""


class GrowingTrees:
    """The growing trees of a client, by routing key.

    Args:
        keeps_kv: see `EngineClient`.
        by_age: see `EngineClient`.
    """

    def __init__(self, *, keeps_kv: bool = False, by_age: bool = False) -> None:
        self._keeps_kv, self._by_age = keeps_kv, by_age
        self._began: dict[str, int] = {}  # policy version at the start of each tree, in the order of starts

    def begin(self, key: str, version: int) -> None:
        """Add a tree, younger than all others, that began with a policy version."""
        self._began[key] = version

    def end(self, key: str) -> None:
        """Remove a tree, if it is there."""
        self._began.pop(key, None)

    def cache_version(self, key: str, version: int) -> int:
        """Return the policy version whose part of the cache a request uses, given the current version."""
        return self._began.get(key, version)

    def priority(self, key: str) -> int:
        """Return the priority of a request that a growing tree sends now: the fewer trees are older, the larger."""
        oldest = list(islice(self._began, PRIORITIES - 1))
        return PRIORITIES - 1 - (oldest.index(key) if key in oldest else len(oldest))

    def fields(self, key: str, version: int) -> dict[str, Any]:
        """Return the fields that a request has because of its tree, given the current policy version.

        Requests of no tree have no priority; the engine takes them first (`options.age_options`).
        """
        found: dict[str, Any] = {"extra_key": str(self.cache_version(key, version))} if self._keeps_kv else {}
        if self._by_age and key in self._began:
            found["priority"] = self.priority(key)
        return found
