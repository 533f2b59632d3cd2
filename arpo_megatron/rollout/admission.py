"""Decides which paths of growing trees may use an engine's KV pool, so that their prefixes stay in its cache.

Pure: it owns no task, client or clock, and draws nothing. `admission_gate` acts on its decisions.

If all paths ran at once, the pool would evict the prefixes of paths that wait for a tool, and compute them again. So a
path is RESIDENT from its first request to its end, and only as many paths are resident as the pool is expected to hold:

- A path is expected to become as long as ended paths were on average; most of that counts. Tokens that paths share
  count once.
- Older trees come first. Within a tree the order is that of path keys, so a fork follows the path that it left.
- A path that waits for admission lets no younger one pass, except paths that are resident.
- A tree belongs to no engine until its first path is admitted; then to the one with the most room. Later it moves to an
  engine that has room if none of its paths is resident: they would compute their prefixes again in any case.
- `margin` times the pool is used. It shrinks if many tokens that should be cached are computed again. It grows if few
  are, and paths wait.
- If the tokens of resident paths exceed the pool, the youngest paths that ask for another segment wait again.
- A path that waits long for a tool is released: others get its room. For each token, keeping costs a part of the pool
  for the time of the wait, and dropping costs the time of a prefill. The costs are equal if the wait is as long as the
  engine needs to compute its whole pool (`rebuild_s`). So a path is released after that time. Releasing earlier if most
  calls are slow gains no speed and computes more tokens again.
- If keeping paths during calls costs more than it saves on average, a path counts for its next segment only: it will
  not be kept until its end.
"""

import heapq
import math
from collections.abc import Sequence

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.rollout.admission_state import (
    FIRST_MARGIN,
    AdmissionFigures,
    AdmittingEngine,
    PathId,
    PathState,
    TreeState,
)

MIN_MARGIN, MAX_MARGIN = 0.8, 1.2
"""Below, engines idle while paths wait for tools; above, more than a tenth of the tokens is computed again."""
BACKOFF, GROWTH = 0.95, 1.02
_RECOMPUTED_SHARE = 0.05
"""The margin shrinks while more tokens than this are computed again for each token that is computed once."""
_FIRST_LENGTH, _FIRST_SEGMENT = 0.5, 0.125
"""Expected length of the first paths and segments, as shares of the longest path. Too long costs less than too short:
paths that outgrow the pool are computed again."""
_STILL_GROWS = 0.7
"""Share of the tokens between its length and the expected one that count for a resident path: when it has grown, others
have ended. With the costs of an 8B model `plan.simulate` samples 1.1 % more tokens per second with 0.7 than with 1.
Smaller shares gain 1 % on average and compute more tokens again (docs/reference/performance.md)."""
_SMOOTHING = 0.05
"""Weight of the newest path in running means."""


class KvAdmission:
    """Admission of the paths of all trees to all engines.

    Args:
        capacities: what each engine can hold; none until `set_capacities`: then nothing is granted.
        rebuild_s: seconds in which an engine computes as many tokens as its pool holds.
    """

    def __init__(self, capacities: Sequence[EngineCapacity] = (), rebuild_s: float = math.inf) -> None:
        self._engines: list[AdmittingEngine] = []
        self.set_capacities(capacities, rebuild_s)
        self._gain = 0.0  # running mean over tool calls of the seconds of a prefill that keeping was worth
        self._trees: dict[int, TreeState] = {}
        self._unbound: list[PathId] = []  # heap of paths that ask, of trees without an engine
        self._length = 0.0  # expected tokens of a path after the prompt
        self._segment = 0.0  # expected tokens of a segment with the tool result before it
        self._recomputed = self._suspended = self._released = self._moved = 0

    def set_capacities(self, capacities: Sequence[EngineCapacity], rebuild_s: float = math.inf) -> None:
        """Set what each engine can hold and how fast it computes, once."""
        self._engines = [AdmittingEngine(each) for each in capacities]
        self._rebuild_s = rebuild_s

    def add_tree(self, tree: int, prompt: int, longest: int) -> None:
        """Add a tree; trees with smaller numbers come first.

        Args:
            tree: its number.
            prompt: tokens of its prompt.
            longest: most tokens of a path after the prompt.
        """
        if not self._length:  # until paths have ended
            self._length, self._segment = _FIRST_LENGTH * longest, _FIRST_SEGMENT * longest
        self._trees[tree] = TreeState(prompt)

    def remove_tree(self, tree: int) -> None:
        """Remove a tree with all of its paths, which have no request in an engine."""
        self._set_footprint(removed := self._trees.pop(tree), 0, 0)
        removed.paths.clear()

    def add_path(self, tree: int, key: PathKey, parent: PathKey | None, start: int) -> None:
        """Add a path that starts after `start` tokens."""
        self._trees[tree].paths[key] = PathState(parent, start, start)

    def ask(self, tree: int, key: PathKey, length: int) -> bool:
        """Note that a path wants to send a request with a prompt of `length` tokens; return whether it is suspended."""
        grown = self._trees[tree]
        path = grown.paths[key]
        path.asks, path.length = True, max(path.length, length)
        engine, suspended = None if grown.engine is None else self._engines[grown.engine], False
        if path.resident and engine is not None:
            self._update(grown)
            if engine.used + self._segment > engine.capacity.tokens and tree != self._oldest(engine):
                path.resident, path.released = False, True
                suspended = True
                self._suspended += 1
                self._update(grown)
        heap = self._unbound if engine is None else engine.ready if path.resident else engine.waiting
        heapq.heappush(heap, (tree, key))
        return suspended

    def grant(self) -> list[tuple[PathId, int]]:
        """Return the paths whose requests may be sent now, and their engines. Each must be followed by `answered`."""
        granted: list[tuple[PathId, int]] = []
        for number in range(len(self._engines)):
            granted += self._grant_of(number)
        while self._engines and (head := self._head(self._unbound)) is not None:
            free = max(range(len(self._engines)), key=lambda n: self._free(self._engines[n]))
            engine = self._engines[free]
            self._trees[head[0]].engine = free
            full = engine.running >= engine.capacity.requests or self._head(engine.waiting) is not None
            if full or not self._admit(engine, head):
                self._trees[head[0]].engine = None
                break
            while (path := self._head(self._unbound)) is not None and path[0] == head[0]:
                heapq.heappush(engine.waiting if path > head else engine.ready, heapq.heappop(self._unbound))
            granted += self._grant_of(free)
        for number in range(len(self._engines)):
            while self._move_to(number):
                granted += self._grant_of(number)
        return granted

    def _move_to(self, number: int) -> bool:
        """Move a tree that waits for another engine to this one if it has room; return whether one has moved."""
        idle = self._engines[number]
        if idle.running >= idle.capacity.requests or self._head(idle.waiting) is not None:
            return False
        others = [engine for engine in self._engines if engine is not idle and engine.waiting]
        paths = [path for engine in others for path in engine.waiting if self._may_move(path)]
        if not paths:
            return False
        path = min(paths)
        tree = self._trees[path[0]]
        if tree.engine is None or not self._has_room(idle, path):
            return False
        busy, tree.engine = self._engines[tree.engine], number
        for each in [each for each in busy.waiting if each[0] == path[0]]:
            busy.waiting.remove(each)
            heapq.heappush(idle.waiting, each)
        heapq.heapify(busy.waiting)
        for moved in tree.paths.values():
            moved.released = True
        self._moved += 1
        return True

    def _may_move(self, path: PathId) -> bool:
        tree = self._trees.get(path[0])
        return tree is not None and path[1] in tree.paths and not tree.reserved

    def _has_room(self, engine: AdmittingEngine, path: PathId) -> bool:
        """Return whether a path that is its tree's only resident one fits."""
        tree = self._trees[path[0]]
        return not engine.reserved or self._free(engine) >= self._final(tree, tree.paths[path[1]])

    def _grant_of(self, number: int) -> list[tuple[PathId, int]]:
        """Return the paths whose requests may be sent to one engine now."""
        engine, granted = self._engines[number], list[tuple[PathId, int]]()
        while engine.running < engine.capacity.requests and (path := self._next(engine)) is not None:
            self._trees[path[0]].paths[path[1]].asks = False
            engine.running += 1
            granted.append((path, number))
        return granted

    def answered(self, engine: int, tree: int, key: PathKey, length: int, cached: int | None) -> int:
        """Note that a granted request has ended; return the tokens of the path that were computed again.

        Args:
            engine: its engine.
            tree: its tree, which may have been removed meanwhile.
            key: its path.
            length: tokens from the root to the end of the path.
            cached: tokens of the prompt that the engine took from its cache; None if there was no answer.
        """
        served = self._engines[engine]
        served.running -= 1
        grown = self._trees.get(tree)
        if grown is None or (path := grown.paths.get(key)) is None:
            return 0
        missing = 0
        if cached is not None:
            missing = max(0, min(path.cached, path.length - 1) - cached)  # the last token is computed in any case
            self._recomputed += missing
            served.recomputed += _SMOOTHING * (missing * (not path.released) - served.recomputed)
            served.due += _SMOOTHING * (path.length - path.cached - served.due)
            if missing and not path.released and served.recomputed > _RECOMPUTED_SHARE * served.due:
                self._back_off(served)
            path.released = False
            self._segment += _SMOOTHING * (length - max(path.cached, path.start) - self._segment)
            path.length, path.cached, path.segments = length, length - 1, path.segments + 1
        self._update(grown)
        return missing

    def end(self, tree: int, key: PathKey) -> None:
        """Note that a path has ended."""
        grown = self._trees[tree]
        path = grown.paths[key]
        path.resident = False
        if path.segments:
            self._length += _SMOOTHING * (path.length - grown.prompt - self._length)
        self._update(grown)
        engine = None if grown.engine is None else self._engines[grown.engine]
        if engine is not None and not engine.draining and (engine.waiting or self._unbound):
            engine.margin = min(MAX_MARGIN, engine.margin * GROWTH)

    @property
    def patience_s(self) -> float:
        """Seconds after which a path that waits for a tool is released."""
        return self._rebuild_s

    def release(self, tree: int, key: PathKey) -> None:
        """Give the room of a path that waits for a tool to others."""
        grown = self._trees[tree]
        path = grown.paths[key]
        if path.resident:
            path.resident, path.released = False, True
            self._released += 1
            self._update(grown)

    def tool_answered(self, seconds: float) -> None:
        """Note the time of a tool call: keeping the path would have been worth a prefill less that time."""
        if math.isfinite(self._rebuild_s):
            gain = self._rebuild_s - seconds if seconds <= self._rebuild_s else -self._rebuild_s
            self._gain += _SMOOTHING * (gain - self._gain)

    def flushed(self) -> None:
        """Note that all caches are empty, after a push."""
        for tree in self._trees.values():
            for path in tree.paths.values():
                path.cached = 0

    def figures(self) -> AdmissionFigures:
        """Return the figures of all trees and engines."""
        paths = [path for tree in self._trees.values() for path in tree.paths.values()]
        idle = [tree for tree in self._trees.values() if not tree.reserved]
        return AdmissionFigures(
            trees_running=len(self._trees) - len(idle),
            trees_waiting=sum(any(path.asks for path in tree.paths.values()) for tree in idle),
            resident=sum(path.resident for path in paths),
            waiting=sum(path.asks and not path.resident for path in paths),
            recomputed=self._recomputed,
            moved=self._moved,
            suspended=self._suspended,
            released=self._released,
            margin=min((engine.margin for engine in self._engines), default=FIRST_MARGIN),
        )

    def _next(self, engine: AdmittingEngine) -> PathId | None:
        """Remove and return the next path that may send a request to an engine."""
        ready, waiting = self._head(engine.ready), self._head(engine.waiting)
        if waiting is not None and (ready is None or waiting < ready) and self._admit(engine, waiting):
            return heapq.heappop(engine.waiting)
        return None if ready is None else heapq.heappop(engine.ready)

    def _admit(self, engine: AdmittingEngine, path: PathId) -> bool:
        """Make a path resident if there is room for it, or nothing else is resident; return whether it is."""
        free = self._free(engine)
        refused = engine.refused is not None and engine.refused[0] == path and free <= engine.refused[1]
        if refused and engine.reserved:
            return False
        tree = self._trees[path[0]]
        asking, before = tree.paths[path[1]], engine.reserved
        asking.resident = True
        self._update(tree)
        if self._free(engine) >= 0 or not before:
            above = None if asking.parent is None else tree.paths[asking.parent]
            if not asking.segments and above is not None and above.resident:
                asking.cached = min(asking.start, above.cached)
                asking.released = above.released  # then both may find nothing, for the same reason
            return True
        asking.resident = False
        self._update(tree)
        engine.refused = path, free
        return False

    def _head(self, heap: list[PathId]) -> PathId | None:
        """Return the first path of a heap, without those of trees that were removed."""
        while heap:
            tree = self._trees.get(heap[0][0])
            if tree is not None and heap[0][1] in tree.paths:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _free(self, engine: AdmittingEngine) -> float:
        return engine.margin * engine.capacity.tokens - engine.reserved

    def _oldest(self, engine: AdmittingEngine) -> int | None:
        return next((n for n, t in self._trees.items() if t.reserved and self._engines[t.engine or 0] is engine), None)

    def _back_off(self, engine: AdmittingEngine) -> None:
        if not engine.draining:
            engine.margin = max(MIN_MARGIN, engine.margin * BACKOFF)
            engine.draining = True

    def _update(self, tree: TreeState) -> None:
        """Count the tokens of a tree again: those of its resident paths, and those that they share with others."""
        needed: dict[PathKey, tuple[int, int]] = {}  # by path, the tokens from the root: reserved, used
        reserved = used = 0
        for key, path in reversed(tree.paths.items()):
            expected, has = needed.get(key, (0, 0))
            if path.resident:
                final = self._final(tree, path)
                expected, has = max(expected, int(final)), max(has, path.length)
            if not expected:
                continue
            reserved, used = reserved + max(0, expected - path.start), used + max(0, has - path.start)
            if path.parent is not None:
                above = needed.get(path.parent, (0, 0))
                needed[path.parent] = (max(above[0], path.start), max(above[1], path.start))
        if reserved:
            reserved, used = reserved + tree.prompt, used + tree.prompt
        self._set_footprint(tree, reserved, used)

    def _final(self, tree: TreeState, path: PathState) -> float:
        """Return the tokens from the root for which a resident path counts."""
        final = path.length + self._segment
        if self._gain >= 0:  # it is kept until its end
            final += max(0.0, _STILL_GROWS * (tree.prompt + self._length - final))
        return final

    def _set_footprint(self, tree: TreeState, reserved: int, used: int) -> None:
        if tree.engine is not None:
            engine = self._engines[tree.engine]
            engine.reserved += reserved - tree.reserved
            engine.used += used - tree.used
            if engine.reserved <= engine.margin * engine.capacity.tokens:
                engine.draining = False
        tree.reserved, tree.used = reserved, used
