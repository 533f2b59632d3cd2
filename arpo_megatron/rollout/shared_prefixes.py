"""Which beginnings of a tree the engine's cache holds, so that what several paths share is computed once.

A weight push empties the cache, and a tree whose engine fails goes on at another one, or at the same one restarted.
Paths that would go on at the same moment would each compute all of their tokens; so one of them has the prompt put into
the cache first, then each fork point below, and the others wait for it. Where neither happens only the prompt is asked
for: a fork point is in the cache before its siblings begin.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.affinity import CacheId
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Int32Array, Role

Prefill = Callable[[Int32Array], Awaitable[None]]


class SharedPrefixes:
    """Of one tree.

    Args:
        prefill: puts a prefix into the cache.
        cache: which one a request of the tree would meet now.
    """

    def __init__(self, prefill: Prefill, cache: Callable[[], CacheId]) -> None:
        self._prefill = prefill
        self._cache = cache
        self._paths: Counter[PathKey] = Counter()  # that pass through a fork point and have not ended
        self._held: dict[PathKey, CacheId] = {}  # the last one that it was put into
        self._asked: dict[PathKey, CacheId] = {}  # the one that a MODEL segment's request has gone to
        self._turns: defaultdict[PathKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add_path(self, node: Node) -> None:
        """A path begins at a MODEL segment."""
        self._paths.update(place.key for place in _fork_points(node))

    def extend_path(self, tool: Node) -> None:
        """A path goes on below a TOOL segment."""
        self._paths[tool.key] += 1

    def end_path(self, node: Node) -> None:
        """A path has ended with that segment."""
        self._paths.subtract(place.key for place in _fork_points(node))

    def hold(self, node: Node) -> None:
        """A request for that MODEL segment was answered: all that stands above it is in the cache that it went to."""
        self._hold(node, self._asked.pop(node.key))

    async def ready(self, node: Node, prefix: Int32Array) -> None:
        """Return when the cache holds what the path of a MODEL segment shares with others, from the root downwards.

        The request for the segment is to be sent at once: later it may meet another cache.

        Args:
            node: the segment that is to be sampled.
            prefix: int32[n], the tokens above it at least.
        """
        for place in reversed(_fork_points(node)):
            if self._paths[place.key] < 2 or self._is_held(place):
                continue
            async with self._turns[place.key]:
                if self._is_held(place):
                    continue
                cache = self._cache()
                await self._prefill(prefix[: place.path_length()])
                if self._cache() == cache:  # else another engine may have answered
                    self._hold(place, cache)
        self._asked[node.key] = self._cache()

    def _hold(self, node: Node, cache: CacheId) -> None:
        self._held.update((place.key, cache) for place in _fork_points(node))

    def _is_held(self, place: Node) -> bool:
        return self._held.get(place.key) == self._cache()


def _fork_points(node: Node) -> list[Node]:
    """Where other paths may leave the one to this segment, itself included, the nearest first."""
    found = []
    above: Node | None = node
    while above is not None:
        if above.role is not Role.MODEL:
            found.append(above)
        above = above.above
    return found
