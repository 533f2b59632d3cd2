"""The prefixes of one tree in the engine's cache, so that tokens shared by several paths are computed once.

A weight push empties the cache. A tree whose engine fails continues on another one, or on the same one after a restart.
All paths then continue at the same time, and each would compute all of its tokens. So one path first puts the prompt
into the cache, then each fork point below it, and the others wait. Without such an event only the prompt is prefilled:
a fork point is in the cache before its siblings start.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.affinity import CacheId, is_same_cache
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Int32Array, Role

MIN_SHARED_PREFIX = 16
"""Shortest common prefix of all prompts that is prefilled by its own request."""

Prefill = Callable[[Int32Array], Awaitable[None]]


class SharedPrefixes:
    """Tracks which prefixes of a tree are in the cache.

    Args:
        prefill: puts a prefix into the cache.
        cache_id: returns the cache that a request of the tree would hit now.
    """

    def __init__(self, prefill: Prefill, cache_id: Callable[[], CacheId]) -> None:
        self._prefill = prefill
        self._cache_id = cache_id
        self._paths: Counter[PathKey] = Counter()
        """Unfinished paths through a fork point."""
        self._cached_in: dict[PathKey, CacheId] = {}
        """The last cache into which a fork point was put."""
        self._sent_to: dict[PathKey, CacheId] = {}
        """The cache that the request for a MODEL segment meets."""
        self._locks: defaultdict[PathKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add_path(self, node: Node) -> None:
        """Add a path that starts with a MODEL segment."""
        self._paths.update(point.key for point in _fork_points(node))

    def extend_path(self, tool: Node) -> None:
        """Extend a path by a TOOL segment."""
        self._paths[tool.key] += 1

    def end_path(self, node: Node) -> None:
        """Remove a path that ended with this segment."""
        self._paths.subtract(point.key for point in _fork_points(node))

    def mark_cached(self, node: Node) -> None:
        """Note that the engine samples a MODEL segment or has: all tokens before it are in the cache it met."""
        self._mark_if_same(node, self._sent_to[node.key])

    async def wait_until_cached(self, node: Node, prefix: Int32Array) -> None:
        """Wait until the cache has what the path of a MODEL segment shares with others, from the root downwards.

        The request for the segment must be sent at once: later it may hit another cache.

        Args:
            node: the segment that will be sampled.
            prefix: int32[n], at least the tokens before it.
        """
        for point in reversed(_fork_points(node)):
            if self._paths[point.key] < 2 or self._is_cached(point):
                continue
            async with self._locks[point.key]:
                if self._is_cached(point):
                    continue
                cache = self._cache_id()
                await self._prefill(prefix[: point.path_length()])
                self._mark_if_same(point, cache)
        self._sent_to[node.key] = self._cache_id()

    def _mark_if_same(self, node: Node, cache: CacheId) -> None:
        """Note that a request was answered that met `cache`. Later, another engine may have answered it."""
        if not is_same_cache(cache, self._cache_id()):
            return
        cache = self._cache_id()
        self._cached_in.update((point.key, cache) for point in _fork_points(node))

    def _is_cached(self, point: Node) -> bool:
        return self._cached_in.get(point.key) == self._cache_id()


def common_prefix_length(prompts: Sequence[Int32Array]) -> int:
    """Return how many tokens all prompts begin with; 0 for fewer than two prompts or `MIN_SHARED_PREFIX` tokens."""
    if len(prompts) < 2:
        return 0
    shortest = min(len(prompt) for prompt in prompts)
    same = np.ones(shortest, dtype=bool)
    for prompt in prompts[1:]:
        same &= prompt[:shortest] == prompts[0][:shortest]
    length = shortest if same.all() else int(same.argmin())
    return length if length >= MIN_SHARED_PREFIX else 0


def _fork_points(node: Node) -> list[Node]:
    """Return the segments on the path to `node`, itself included, after which paths may fork; the nearest first."""
    points = []
    above: Node | None = node
    while above is not None:
        if above.role is not Role.MODEL:
            points.append(above)
        above = above.parent
    return points
