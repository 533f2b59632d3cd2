"""A discrete model of one SGLang engine: its KV pool with a radix cache, its queue, and its batches.

It follows the scheduler of SGLang 0.5.18 (`managers/scheduler.py`, `schedule_policy.py`, `mem_cache/radix_cache.py`):

- The queue has larger priorities first, and is first in, first out among equal ones. New requests are prefilled before
  running ones decode; none of those gives way.
- A request enters the batch if the pool has room for its new tokens, for those that it may sample (at most 4096), and
  for a share of those that running requests may still sample. The share falls from 0.7 to 0.098 in 600 decoding steps;
  an idle engine resets it.
- The cache evicts the leaf that was used least recently. A leaf is what one request has added: the segment that it
  sampled, or all tokens that it computed, up to a place where another request has ended.
- Requests of one batch do not share the tokens that they compute.
- If the pool is full while requests decode, the one with the fewest sampled tokens is retracted: it loses its tokens'
  KV and joins the queue again.

Left out: chunked prefill, pages, the overlap of scheduler and GPU.
"""

import heapq
import itertools
from bisect import insort_left, insort_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

FIRST_RATIO, LAST_RATIO, RATIO_STEPS = 0.7, 0.098, 600
CLIP_NEW_TOKENS = 4096
PREFILL_BATCH = 16384
"""Most tokens that one batch prefills."""
RETRACT_STEPS = 20


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Sizes and times of an engine."""

    tokens: int
    """Size of the KV pool."""
    requests: int
    """Most running requests."""
    step_s: float
    """Seconds of a decoding step, whatever its batch."""
    request_s: float = 0.0
    """Additional seconds for each request of the batch."""
    context_s: float = 0.0
    """Additional seconds for each token of KV that the batch reads."""
    prefill_s: float = 0.0
    """Seconds to compute a prompt token."""
    batch_s: float = 0.0
    """Seconds of a batch of prefills, whatever its tokens."""
    conservativeness: float = 1.0
    """SGLang's `schedule_conservativeness`: factor of the share that it reserves."""


@dataclass(slots=True, eq=False)
class KvBlock:
    """KV cache of one segment: a node of the radix tree, or a part of one."""

    parent: "KvBlock | None"
    tokens: int = 0
    resident: bool = False
    locks: int = 0
    used: int = 0
    """Time of the last use, counted in uses."""
    below: int = 0
    """Resident blocks below it."""
    tail: "KvBlock | None" = None
    """Block below it in the same node: both were computed by one request, and no other request ended between them."""


@dataclass(slots=True, eq=False)
class Request:
    """A request for the tokens of one segment."""

    above: KvBlock
    """The segment before it."""
    sample: int
    """Tokens that it will sample; 0 only computes the prompt."""
    limit: int
    """Most tokens that it may sample, as the engine knows it."""
    done: Callable[["Request"], None]
    first: tuple[int, Callable[[], None]] | None = None
    """A number of tokens, and what is called once they are sampled."""
    output: KvBlock = field(default_factory=lambda: KvBlock(None))
    computed: int = 0
    """Prompt tokens that it had to compute, repeated ones included."""
    context: int = 0
    """Tokens before it."""
    priority: int = 0


class SimulatedEngine:
    """One engine. `at` schedules its batches on the clock of the simulation.

    Args:
        model: sizes and times.
        at: called with a delay in seconds and what then happens.
        quantum: decoding steps that are simulated at once, at most.
    """

    def __init__(self, model: EngineModel, at: Callable[[float, Callable[[], None]], None], quantum: int = 8) -> None:
        self.model = model
        self.computed = 0
        """Prompt tokens computed so far."""
        self.evicted = 0
        """Tokens evicted so far, without those of `flush`."""
        self.retracted = 0
        """Running requests that had to give up their tokens so far, because the pool was full."""
        self.busy_s = 0.0
        """Seconds of all batches so far."""
        self._at, self._quantum = at, quantum
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._free, self._evictable = model.tokens, 0
        self._leaves: list[tuple[int, int, KvBlock]] = []
        self._uses = itertools.count(1)
        self._ratio = self._first_ratio
        self._full = self._active = self._paused = False

    @property
    def _first_ratio(self) -> float:
        return min(1.0, FIRST_RATIO * self.model.conservativeness)

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""
        block: KvBlock | None = request.above
        while block is not None:
            request.context += block.tokens
            block = block.parent
        request.output.parent = request.above
        insort_right(self._queue, request, key=_place)
        if not self._active:
            self._active = True
            self._at(0.0, self._iterate)

    def pause(self) -> None:
        """Compute nothing after the batch that runs, until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """End a `pause`."""
        self._paused = False
        if not self._active:
            self._active = True
            self._at(0.0, self._iterate)

    def flush(self) -> None:
        """Empty the cache, as a weight push does: running requests compute their tokens again."""
        for request in self._running:
            self._retract(request, count=False)
        for request in reversed(self._running):
            insort_left(self._queue, request, key=_place)
        self._running = []
        self._evict(self.model.tokens, count=False)

    def _iterate(self) -> None:
        if self._paused or not (self._queue or self._running):
            self._active, self._ratio = False, self._first_ratio
            return
        took = self._prefill() or self._decode()
        self.busy_s += took
        self._at(took, self._iterate)

    def _prefill(self) -> float:
        """Start a batch of prefills; return its seconds, 0 if no request may enter."""
        if self._full and self._running:
            return 0.0
        new, computed, reserved = list[Request](), 0, sum(map(self._reserve, self._running))
        while self._queue and len(self._running) + len(new) < self.model.requests and computed < PREFILL_BATCH:
            request = self._queue[0]
            self._lock(request, 1)
            tokens, allowed = self._missing(request), min(request.limit, CLIP_NEW_TOKENS)
            room = self._free + self._evictable - reserved
            if tokens + allowed >= room and (self._running or new):
                self._lock(request, -1)
                self._full = True
                break
            new.append(self._queue.pop(0))
            request.computed += tokens
            computed, reserved = computed + tokens, reserved + tokens + allowed
        if not new:
            return 0.0
        self._evict(computed)
        self.computed += computed
        for request in new:
            self._load(request)
            if request.sample:
                self._grow(request, 1)
        self._running += new
        took = self.model.batch_s + computed * self.model.prefill_s
        self._finish(took)
        return took

    def _decode(self) -> float:
        """Decode a few steps; return their seconds."""
        while self._free + self._evictable < len(self._running) and len(self._running) > 1:
            victim = min(self._running, key=lambda each: (each.output.tokens, -each.context))
            self._running.remove(victim)
            self._retract(victim)
            insort_right(self._queue, victim, key=_place)
            sampled = sum(each.output.tokens for each in self._running)
            limit = sum(each.limit for each in self._running)
            self._ratio = min(1.0, (sampled + RETRACT_STEPS * len(self._running)) / (limit + 1))
        room = (self._free + self._evictable) // len(self._running)
        count = max(1, min(self._quantum, room, *(self._left(each) for each in self._running)))
        context = sum(each.context + each.output.tokens for each in self._running)
        for request in self._running:
            self._grow(request, count)
        decay = (FIRST_RATIO - LAST_RATIO) / RATIO_STEPS * self.model.conservativeness
        self._ratio = max(LAST_RATIO * self.model.conservativeness, self._ratio - count * decay)
        model = self.model
        took = count * (model.step_s + model.request_s * len(self._running) + model.context_s * context)
        self._finish(took)
        return took

    def _left(self, request: Request) -> int:
        sampled = request.output.tokens
        first = request.first[0] + 1 - sampled if request.first is not None else request.sample
        return max(1, min(request.sample - sampled, first))

    def _finish(self, took: float) -> None:
        """Take ended requests out of the batch, which takes this many seconds."""
        ended = [each for each in self._running if each.output.tokens >= each.sample]
        for request in self._running:
            if request.first is not None and request.output.tokens > request.first[0]:
                (_, call), request.first = request.first, None
                self._at(took, call)
        if ended:
            gone = set(map(id, ended))
            self._running = [each for each in self._running if id(each) not in gone]
            self._full = False
        for request in ended:
            self._lock(request, -1)
            self._at(took, partial(request.done, request))

    def _reserve(self, request: Request) -> float:
        return min(request.limit - request.output.tokens, CLIP_NEW_TOKENS) * self._ratio

    def _chain(self, request: Request) -> list[KvBlock]:
        blocks, block = [request.output], request.output.parent
        while block is not None:
            blocks.append(block)
            block = block.parent
        return blocks

    def _missing(self, request: Request) -> int:
        """Return the tokens to compute: those that the cache lacks, and the last one, whose logits are needed."""
        missing = sum(block.tokens for block in self._chain(request) if not block.resident)
        alone = request.above.parent is None or not missing
        return max(1, missing) if alone else missing + 1

    def _load(self, request: Request) -> None:
        loaded: KvBlock | None = None
        for block in reversed(self._chain(request)):
            if block.resident:
                continue
            block.resident = True
            self._free -= block.tokens
            if block.parent is not None:
                block.parent.below += 1
            if loaded is not None and block is not request.output:
                loaded.tail = block
            loaded = block
        request.above.tail = None

    def _grow(self, request: Request, count: int) -> None:
        self._evict(count)
        request.output.tokens += count
        self._free -= count

    def _lock(self, request: Request, change: int) -> None:
        self._touch(request)
        for block in self._chain(request):
            before, block.locks = block.locks, block.locks + change
            if block.resident and not (before and block.locks):
                self._evictable += block.tokens if not block.locks else -block.tokens
            self._offer(block)

    def _touch(self, request: Request) -> None:
        """Mark the cached blocks of a request as used now, and let a node end with the last of them."""
        used, last = next(self._uses), None
        for block in reversed(self._chain(request)):
            if not block.resident:
                break
            block.used, last = used, block
        if last is not None:
            last.tail = None

    def _offer(self, block: KvBlock) -> None:
        if block.resident and not block.locks and not block.below:
            heapq.heappush(self._leaves, (block.used, id(block), block))

    def _evict(self, need: int, *, count: bool = True) -> None:
        """Evict leaves until `need` tokens are free, or none is left."""
        while self._free < need and self._leaves:
            used, _, block = heapq.heappop(self._leaves)
            if not block.resident or block.locks or block.below:
                continue
            if block.used != used:
                self._offer(block)
                continue
            self._evict_node(block, count=count)

    def _evict_node(self, leaf: KvBlock, *, count: bool) -> None:
        """Evict the node that ends with a block."""
        block: KvBlock | None = leaf
        while block is not None:
            block.resident = False
            self._free += block.tokens
            self._evictable -= block.tokens
            self.evicted += block.tokens * count
            above = block.parent
            if above is None:
                return
            above.below -= 1
            if above.tail is not block:
                self._offer(above)
                return
            above.tail, block = None, above

    def _retract(self, request: Request, *, count: bool = True) -> None:
        """Take a request's own tokens out of the pool; its prefix stays in the cache."""
        self._lock(request, -1)
        output = request.output
        output.resident = False
        self._free += output.tokens
        self._evictable -= output.tokens
        request.above.below -= 1
        self._offer(request.above)
        self.retracted += count


def _place(request: Request) -> int:
    """Return the key by which the queue is sorted."""
    return -request.priority
