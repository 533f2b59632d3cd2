"""Client of SGLang servers that may fail, restart and receive new weights at any time (`request` has the types).

Failed requests are retried. Sampling again is harmless, because no token of a lost answer was used.

Requests with the same routing key go to one engine (`affinity`), so a tree's prefixes are in the cache that its
siblings use. A failing engine is left alone for a while, and its trees use another one meanwhile. SGLang's router
knows nothing about weights: requests that it sends to an engine with old weights bypass it until the next push.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import aiohttp

from arpo_megatron.engine.affinity import ROUTING_KEY_HEADER, CacheId, EngineRoutes, EngineState
from arpo_megatron.engine.capacity import EngineCapacity, read_capacities, total_capacity
from arpo_megatron.engine.exchange import (
    CONNECT_TIMEOUT_S,
    FirstTokensListener,
    StaleError,
    TransientError,
    abort_all,
    failure_message,
    failure_reason,
    post_generation,
    quick_answers,
    read_version,
)
from arpo_megatron.engine.expert_routes import ExpertRouteRequest
from arpo_megatron.engine.growing_trees import GrowingTrees
from arpo_megatron.engine.request import (
    NO_MORE,
    Generation,
    Sampling,
    first_tokens,
    generation_request,
    prefill_request,
    read_generation,
    read_prefill,
    version_of,
)
from arpo_megatron.engine.wire.endpoints import bearer
from arpo_megatron.tree import Int32Array

_ABORT_INTERVAL_S = 0.05


class EngineUnavailableError(RuntimeError):
    """No answer after all retries: the engines are down, hang, abort requests, or lack the weights."""


class EngineClient:
    """Client of the servers at `urls`, which serve the same policy, for one event loop. Use as `async with`.

    Args:
        urls: http://host:port of each engine.
        router: URL of SGLang's router, which then distributes generations; None: this client distributes them.
        token: bearer token of engines and router; None if they need none.
        request_timeout_s: deadline of one attempt. It starts when the request runs, if `streams`.
        retry_for_s: time after a request's first failure during which it is retried (an engine may be restarting).
            Waiting for a push (`on_stale`) does not count.
        keeps_kv: a push leaves the engines' caches as they are. Trees that began with the same policy version share a
            part of the cache (SGLang's `extra_key`), so a newer tree never reads older keys and values.
        streams: the engines stream entropies (`version.streams_entropies`). Not through SGLang's router, which drops
            the interval of a stream.
        by_age: requests have the priority of their tree: an engine takes waiting ones of older trees first. It must run
            with `options.age_options`.
    """

    def __init__(
        self,
        *urls: str,
        router: str | None = None,
        token: str | None = None,
        request_timeout_s: float = 600.0,
        retry_for_s: float = 60.0,
        keeps_kv: bool = False,
        streams: bool = False,
        by_age: bool = False,
    ) -> None:
        self.streams = streams and router is None
        """Whether `generate` can report the first tokens of an answer."""
        self.keeps_kv = keeps_kv
        self.version = 0
        """Oldest accepted policy version. Answers from older weights, as a restarted engine has, are sampled again."""
        self.pushes = 0
        """Number of calls of `resume`. Each empties the engines' caches, unless `keeps_kv`."""
        self.retries: Counter[str] = Counter()
        """Retried attempts by reason: connection, timeout, HTTP 503, abort, stale, unreadable."""
        self.on_stale: Callable[[str], None] | None = None
        """Called with the URL of an engine whose weights are older than `version`; requests then wait for the push that
        follows. None: no one pushes, so requests to that engine fail."""
        self._selector = EngineRoutes(urls, router)
        self._engines = self._selector.engines
        self._trees = GrowingTrees(keeps_kv=keeps_kv, by_age=by_age)
        self._probes: dict[EngineState, asyncio.Task[int]] = {}  # running requests for an engine's version
        self._headers = bearer(token)
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._in_flight = 0
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Self:
        # No limit on connections: the engine queues better than a client could.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def pause(self) -> None:
        """Hold new requests, cut running ones short, and return when all engines are idle.

        Raises:
            EngineUnavailableError: an engine does not become idle.
        """
        clock = asyncio.get_running_loop().time
        self._gate.clear()
        give_up = clock() + self._retry_for_s
        # An abort misses requests that have not reached the engine yet, and this client does not count requests whose
        # task was cancelled. So abort until every engine is idle.
        while busy := await self._busy_after_abort():
            if clock() > give_up:
                raise EngineUnavailableError(f"engines did not abort their requests: {', '.join(busy)}")
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_INTERVAL_S)

    def hold(self) -> None:
        """Hold requests until `resume`; for a client that has sent none yet."""
        self._gate.clear()

    def resume(self, version: int) -> None:
        """Send requests again; answers come from policy `version` or a later one."""
        self.version = version
        self.pushes += 1
        self._selector.pushed()
        self._gate.set()

    def cache_id(self, key: str) -> CacheId:
        """Return the cache that a request with this routing key would hit now."""
        engine = self._selector.pick(key, asyncio.get_running_loop().time())
        version = self._trees.cache_version(key, self.version)
        return engine.url, engine.incarnation, version if self.keeps_kv else self.pushes

    def begin_tree(self, key: str, version: int) -> None:
        """Note a new tree with its routing key and the policy version with which it began, until `end_tree`."""
        self._trees.begin(key, version)

    def end_tree(self, key: str) -> None:
        """Forget the tree of a routing key."""
        self._trees.end(key)

    def _of_tree(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        """Return a request that has the fields of its tree."""
        return body | self._trees.fields(key, self.version)

    def pin(self, key: str, url: str | None) -> None:
        """Send requests with this routing key to one engine while it is up; None: to any. A router decides alone."""
        self._selector.pin(key, url)

    async def capacities(self) -> list[tuple[str, EngineCapacity]]:
        """Return the URL and the capacity of each engine (`read_capacities`); with a router, its URL and the sums."""
        urls = [engine.url for engine in self._engines]
        capacities = await read_capacities(self._connected(), urls, wait_s=self._retry_for_s)
        if self._selector.router is not None and capacities:  # it chooses the engine itself
            return [(self._selector.router, total_capacity(capacities))]
        return list(zip(urls, capacities, strict=False))

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        key: str = "",
        routes: ExpertRouteRequest | None = None,
        ready: Callable[[], Awaitable[None]] | None = None,
        on_retry: Callable[[], None] = lambda: None,
        first: tuple[int, Callable[[Generation], None]] | None = None,
        encoded: Sequence[bytes] = (),
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids`, or up to and including one of the `stop` strings.

        A `pause` cuts the answer short (`EngineFinish.CUT_SHORT`); the next request then waits for `resume`.

        Args:
            input_ids: the whole prefix.
            max_new_tokens: at least 1.
            sampling: how tokens are drawn.
            stop: strings that end the generation; the token that completes one is kept.
            key: requests with the same routing key go to the same engine while it is up.
            routes: the expert routes to return.
            ready: awaited before each attempt, after any wait for `resume`. The attempt goes to the engine of the
                `cache_id` at the moment when it returns.
            on_retry: called before each retry.
            first: a number of tokens, and what is called with that many first tokens while the engine samples the rest;
                not called if the answer has no more. The answer begins with these tokens: if the attempt fails later,
                it is cut short after them. Needs `streams`, and no `routes`.
            encoded: `encode_ids` of consecutive parts of `input_ids`, if the caller has it: writing 16,000 tokens as
                JSON costs a third of a request.

        Raises:
            EngineUnavailableError: no answer after all retries.
            EngineRefusedError: the request itself is at fault.
            ValueError: the engine does not return the routes.
        """
        watch = None if first is None else FirstTokensListener(first[0], partial(self._accept_first, *first))
        stream = 0 if not self.streams else NO_MORE if first is None else first[0]
        body = generation_request(
            input_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            routes=routes,
            stream=stream,
            encoded=encoded,
        )
        answer = await self._request(self._of_tree(body, key), key, ready, on_retry, watch)
        if watch is not None and answer is watch.answer:
            return first_tokens(answer, watch.count)
        return read_generation(answer, routes)

    def _accept_first(self, count: int, call: Callable[[Generation], None], answer: dict[str, Any]) -> bool:
        if version_of(answer["meta_info"]) < self.version:
            return False
        call(first_tokens(answer, count))
        return True

    async def prefill(
        self, input_ids: Sequence[int] | Int32Array, *, key: str = "", on_retry: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Put a prefix into the radix cache; return the number of prompt tokens, and how many were cached before.

        Without it, requests that start from the same new prefix at the same time would each compute it.
        """
        body = self._of_tree(prefill_request(input_ids), key)
        return read_prefill(await self._request(body, key, on_retry=on_retry))

    async def prefill_everywhere(
        self, input_ids: Sequence[int] | Int32Array, *, on_retry: Callable[[], None] = lambda: None
    ) -> list[tuple[int, int]]:
        """Put a prefix that all trees share into the radix cache of every engine; a `pause` restarts it.

        Engines that do not answer, or take much longer than the first, are skipped.

        Raises:
            EngineUnavailableError: no engine answered.
            EngineRefusedError: the request itself is at fault.
        """
        if len(self._engines) == 1:
            return [await self.prefill(input_ids, on_retry=on_retry)]
        while True:
            await self._gate.wait()
            pushes, body = self.pushes, self._of_tree(prefill_request(input_ids), "")
            answers = await quick_answers([self._attempt(engine, body) for engine in self._engines])
            if self._gate.is_set() and self.pushes == pushes:  # else a push has emptied the caches
                if answers:
                    return [read_prefill(answer) for answer in answers]
                return [await self.prefill(input_ids, on_retry=on_retry)]  # it waits for an engine, or raises

    async def _request(
        self,
        body: Mapping[str, Any],
        key: str = "",
        ready: Callable[[], Awaitable[None]] | None = None,
        on_retry: Callable[[], None] = lambda: None,
        first: FirstTokensListener | None = None,
    ) -> dict[str, Any]:
        """POST /generate until a new enough policy answers; raise if the request is refused or the retries run out.

        If an attempt fails after `first` has accepted tokens, they are the answer.
        """
        clock = asyncio.get_running_loop().time
        give_up, strikes = float("inf"), 0
        while True:
            if not self._gate.is_set():
                await self._gate.wait()
                give_up, strikes = float("inf"), 0
            engine = self._selector.pick(key, clock())
            if (backoff_s := engine.backoff_until - clock()) > 0:
                await asyncio.sleep(backoff_s)
                continue  # another engine may be up by now, or a pause may have begun
            try:
                if not await self._is_ready(engine, ready):
                    continue  # a pause has begun meanwhile and did not count this request
                engine = self._selector.pick(key, clock())
                answer = await self._attempt(engine, body, key, first)
                self._check_version(version_of(answer["meta_info"]))
            except (aiohttp.ClientError, TimeoutError, TransientError) as error:
                self._count_failure(error, on_retry)
                if first is not None and first.answer is not None:
                    return first.answer
                if not self._gate.is_set():
                    continue
                if isinstance(error, StaleError) and engine not in self._engines:
                    await self._start_bypass(key)
                    continue
                strikes += 1
                if isinstance(error, StaleError) and self.on_stale is not None:
                    if engine.record_failure(clock()):
                        self.on_stale(engine.url)
                    continue  # the wait for the push has no deadline here
                give_up = min(give_up, clock() + self._retry_for_s)
                if clock() >= give_up:
                    text = f"the engine at {engine.url} does not answer: {failure_message(error)}"
                    raise EngineUnavailableError(text) from error
                reason, stale = failure_reason(error), isinstance(error, StaleError)
                rest_s = self._selector.rest_s(key, engine, reason, stale=stale, strikes=strikes, now=clock())
                await asyncio.sleep(rest_s)
            else:
                engine.record_answer()
                return answer

    def _count_failure(self, error: Exception, on_retry: Callable[[], None]) -> None:
        if self._gate.is_set():  # else the pause has cut it short
            self.retries[failure_reason(error)] += 1
            on_retry()

    async def _is_ready(self, engine: EngineState, ready: Callable[[], Awaitable[None]] | None) -> bool:
        """Check an engine that has failed, and wait until the request is ready; return whether no pause holds it."""
        if engine.suspect and engine in self._engines:
            self._check_version(await self._probe(engine))
        if ready is not None:
            await ready()
        return self._gate.is_set()

    async def _attempt(
        self, engine: EngineState, body: Mapping[str, Any], key: str = "", first: FirstTokensListener | None = None
    ) -> dict[str, Any]:
        self._in_flight += 1
        try:
            return await self._exchange(engine, body, key, first)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _exchange(
        self, engine: EngineState, body: Mapping[str, Any], key: str, first: FirstTokensListener | None = None
    ) -> dict[str, Any]:
        headers = {ROUTING_KEY_HEADER: key} if key else {}
        answer = await post_generation(
            self._connected(), engine, body, headers, timeout_s=self._request_timeout_s, first=first
        )
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort" and (self._gate.is_set() or len(answer.get("output_ids") or []) < 2):
            raise TransientError("abort", str(finish.get("message", "")))
        return answer

    async def _busy_after_abort(self) -> list[str]:
        """Abort all requests; return the URLs of the engines that may still be running some."""
        idle = await asyncio.gather(*(abort_all(self._connected(), engine.url) for engine in self._engines))
        all_busy = self._in_flight > 0
        return [engine.url for engine, done in zip(self._engines, idle, strict=True) if all_busy or not done]

    async def _probe(self, engine: EngineState) -> int:
        """Return the engine's policy version; requests that ask for it at the same time share the answer."""
        if engine not in self._probes:
            self._probes[engine] = asyncio.create_task(read_version(self._connected(), engine))
            self._probes[engine].add_done_callback(lambda _task: self._probes.pop(engine, None))
        return await asyncio.shield(self._probes[engine])

    async def _start_bypass(self, key: str) -> None:
        """Send requests with this key directly to an engine: the router pins it to one with old weights.

        Only the router knows which engine that is, so each engine's version is checked before it is used.
        """
        if not self._selector.bypass_router(key):
            return  # another path of the tree has noticed first
        await asyncio.gather(*map(self._check_stale, self._engines))

    async def _check_stale(self, engine: EngineState) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it is down; the supervisor restarts it
            stale = await read_version(self._connected(), engine) < self.version
            if stale and engine.record_failure(asyncio.get_running_loop().time()) and self.on_stale is not None:
                self.on_stale(engine.url)

    def _check_version(self, version: int) -> None:
        if version < self.version:
            raise StaleError("stale", f"it serves policy version {version}, not {self.version}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        return self._session
