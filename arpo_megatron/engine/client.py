"""Speaking to SGLang servers that may fail, restart and get other weights meanwhile (`generation` has the words).

Requests that fail on the way are repeated; sampling anew is harmless, since nothing of a lost answer was used.

Requests with one routing key go to one engine (`routing`), so that what a tree has prefilled is in the cache of the
engine its siblings go to. An engine that fails rests for a while, and its trees go to another one meanwhile. A router
does not know of weights: what it sends to an engine with old ones goes past it until the push that follows.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import aiohttp

from arpo_megatron.engine.affinity import ROUTING_KEY_HEADER, Cache, EngineState, place
from arpo_megatron.engine.expert_routes import RouteRequest
from arpo_megatron.engine.request import (
    EngineRefusedError,
    Generation,
    Sampling,
    generation_request,
    prefill_request,
    read_generation,
    read_prefill,
    version_of,
)
from arpo_megatron.engine.server.gate import bearer
from arpo_megatron.tree import Int32Array

_ABORT_INTERVAL_S = 0.05
_LOOK_TIMEOUT_S = 5.0
_LEAST_PATIENCE_S = 1.0
"""With the slower engines, where another one has prefilled what all trees begin with."""
_PASSING_STATUS = 500  # and above: starting, shutting down, weights arriving, a router without an engine
_ALSO_PASSING = (408, 425, 429)  # too late, too early, too many: of a proxy or router before the engine


class EngineUnavailableError(RuntimeError):
    """No answer after all repetitions: the engines are gone, hang, abort what they are asked, or lack the weights."""


class EngineClient:
    """Client of the servers at `urls`, which serve the same policy, for one event loop. Use as `async with`.

    Args:
        urls: http://host:port of each engine.
        router: of SGLang's router before them, through which generations go then; None: this client distributes them.
        token: that engines and router ask for, if they do.
        request_timeout_s: deadline of one attempt.
        retry_for_s: how long after its first failure a request is repeated (an engine may be restarting). Waiting for a
            push (`on_stale`) does not count.

    Attributes:
        on_stale: called with the URL of an engine that serves an older policy than `version`, whenever one is met;
            requests wait for the push that follows. None: nobody pushes, and they fail.
        pushes: how often requests were let pass again; the engines' caches are empty each time.
        version: oldest policy whose tokens are accepted. What an engine with an older one answers (a restarted engine
            is such) is thrown away and asked for again.
        repeated: attempts that had to be repeated, by reason ("connection", "timeout", "HTTP 503", "abort", "stale",
            "unreadable").
    """

    def __init__(
        self,
        *urls: str,
        router: str | None = None,
        token: str | None = None,
        request_timeout_s: float = 600.0,
        retry_for_s: float = 60.0,
    ) -> None:
        self.version = self.pushes = 0
        self.repeated: Counter[str] = Counter()
        self._engines = tuple(EngineState(url.rstrip("/")) for url in urls)
        self._targets = self._engines if router is None else (EngineState(router.rstrip("/")),)
        self._past_router: set[str] = set()  # keys that it sends to engines with old weights
        self._headers = bearer(token)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._retry_for_s = retry_for_s
        self.on_stale: Callable[[str], None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._in_flight = 0
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Self:
        # No limit on connections: the engine queues better than a client could.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def pause(self) -> None:
        """Hold requests back from now on, cut those short that run, and return when the engine is idle.

        Raises:
            EngineUnavailableError: an engine does not end them.
        """
        clock = asyncio.get_running_loop().time
        self._gate.clear()
        give_up = clock() + self._retry_for_s
        # Again and again: a request may have been on its way when the last abort was said, and one whose asker was
        # cancelled is known to the engine alone.
        while busy := await self._busy_after_abort():
            if clock() > give_up:
                raise EngineUnavailableError(f"engines that do not end their requests: {', '.join(busy)}")
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_INTERVAL_S)

    def hold(self) -> None:
        """Let no request pass; for a client that has not asked anything yet."""
        self._gate.clear()

    def resume(self, version: int) -> None:
        """Let requests pass again; answers come from policy `version` or a later one."""
        self.version = version
        self.pushes += 1
        self._past_router.clear()
        self._gate.set()

    def cache(self, key: str) -> Cache:
        """Which cache a request with this routing key meets if it is sent now."""
        engine = self._place(key)
        return engine.url, engine.failures, self.pushes

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        key: str = "",
        routes: RouteRequest | None = None,
        ready: Callable[[], Awaitable[None]] | None = None,
        on_repeat: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids`, ending early behind any of the `stop` strings.

        The answer may be shorter for a `pause`; then `finish` says so, and whoever asks again waits for `resume`.

        Args:
            input_ids: the whole prefix.
            max_new_tokens: at least 1.
            sampling: how tokens are drawn.
            stop: strings that end the generation; the token that completes one is kept.
            key: requests with the same routing key go to the same engine, as long as it is up.
            routes: which expert routes to return.
            ready: is awaited before each attempt, after any wait for `resume`; the attempt goes to the `cache` of the
                moment at which it returns.
            on_repeat: is called for each attempt that has to be made again.

        Raises:
            EngineUnavailableError: no answer after all repetitions.
            EngineRefusedError: the request itself is at fault.
            ValueError: the engine does not return the routes.
        """
        body = generation_request(input_ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, routes=routes)
        return read_generation(await self._request(body, key, ready, on_repeat), routes)

    async def prefill(
        self, input_ids: Sequence[int] | Int32Array, *, key: str = "", on_repeat: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Put a prefix into the radix cache, sampling nothing; returns (prompt tokens, of which were cached).

        Requests that start at once from a prefix nobody has prefilled would each compute it.
        """
        return read_prefill(await self._request(prefill_request(input_ids), key, on_repeat=on_repeat))

    async def prefill_everywhere(
        self, input_ids: Sequence[int] | Int32Array, *, on_repeat: Callable[[], None] = lambda: None
    ) -> list[tuple[int, int]]:
        """As `prefill`, on every engine: for what all trees begin with. A `pause` meanwhile makes it begin again.

        An engine that does not answer goes without, also one that takes much longer than the first.

        Raises:
            EngineUnavailableError: none of them answered.
            EngineRefusedError: the request itself is at fault.
        """
        if len(self._engines) == 1:
            return [await self.prefill(input_ids, on_repeat=on_repeat)]
        body = prefill_request(input_ids)
        while True:
            await self._gate.wait()
            pushes = self.pushes
            found = await self._ask_everywhere(body)
            if self._gate.is_set() and self.pushes == pushes:  # else the caches are empty again
                # Where none has answered, one of them says why, or is waited for.
                return [read_prefill(answer) for answer in found] or [
                    await self.prefill(input_ids, on_repeat=on_repeat)
                ]

    async def _ask_everywhere(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answers of the engines to one attempt each, without those that fail or take much longer than the first."""
        began = asyncio.get_running_loop().time()
        asked = [asyncio.create_task(self._attempt(engine, body)) for engine in self._engines]
        waiting, done = set(asked), list[asyncio.Task[dict[str, Any]]]()
        try:
            while waiting and not done:
                answered, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done = [task for task in answered if task.exception() is None]
            if waiting:  # one that hangs must not hold back the trees of the others
                took = asyncio.get_running_loop().time() - began
                await asyncio.wait(waiting, timeout=max(_LEAST_PATIENCE_S, 2 * took))
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return [task.result() for task in asked if not task.cancelled() and task.exception() is None]

    async def _request(
        self,
        body: Mapping[str, Any],
        key: str = "",
        ready: Callable[[], Awaitable[None]] | None = None,
        on_repeat: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """POST /generate until it is answered with a policy new enough, refused, or given up."""
        clock = asyncio.get_running_loop().time
        give_up = float("inf")
        while True:
            if await self._passed(ready):
                give_up = float("inf")
            engine = self._place(key)
            if (rest_s := engine.rests_until - clock()) > 0:
                await asyncio.sleep(rest_s)
                continue  # another one may be up by now, or none asked
            try:
                if engine.suspect and self.version and engine in self._engines:
                    self._check_version(await self._version(engine))
                    if not self._gate.is_set():
                        continue  # a pause has begun meanwhile, and may have seen no request
                answer = await self._attempt(engine, body, key)
                self._check_version(version_of(answer["meta_info"]))
            except (aiohttp.ClientError, TimeoutError, _PassingError) as error:
                if not self._gate.is_set():
                    continue  # the pause has cut it short
                self.repeated[_reason(error)] += 1
                on_repeat()
                if isinstance(error, _StaleError) and engine not in self._engines:
                    await self._leave_router(key)
                    continue
                first = engine.failed(clock())
                if isinstance(error, _StaleError) and self.on_stale is not None:
                    if first:
                        self.on_stale(engine.url)
                    continue  # however long the push takes to come
                give_up = min(give_up, clock() + self._retry_for_s)
                if clock() >= give_up:
                    text = f"the engine at {engine.url} does not answer: {_text(error)}"
                    raise EngineUnavailableError(text) from error
            else:
                engine.answered()
                return answer

    def _place(self, key: str) -> EngineState:
        targets = self._engines if key in self._past_router else self._targets
        return place(key, targets, asyncio.get_running_loop().time())

    async def _passed(self, ready: Callable[[], Awaitable[None]] | None) -> bool:
        """Return when a request may pass and is `ready`; whether it had to wait for `resume`."""
        waited = False
        while True:
            if not self._gate.is_set():
                waited = True
                await self._gate.wait()
            if ready is None:
                return waited
            await ready()
            if self._gate.is_set():
                return waited

    async def _attempt(self, engine: EngineState, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        self._in_flight += 1
        try:
            return await self._exchange(engine, body, key)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _exchange(self, engine: EngineState, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        headers = {ROUTING_KEY_HEADER: key} if key else {}
        async with self._connected().post(f"{engine.url}/generate", json=body, headers=headers) as response:
            if response.status >= _PASSING_STATUS or response.status in _ALSO_PASSING:
                raise _PassingError(f"HTTP {response.status}", (await response.text(errors="replace"))[:200])
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                raise EngineRefusedError(f"HTTP {response.status} from the engine: {text}")
            answer = await _read(response)
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort" and (self._gate.is_set() or len(answer.get("output_ids") or []) < 2):
            raise _PassingError("abort", str(finish.get("message", "")))
        return answer

    async def _busy_after_abort(self) -> list[str]:
        """Abort all requests everywhere; URLs of the engines that may still have some."""
        idle = await asyncio.gather(*map(self._abort_all, self._engines))
        all_busy = self._in_flight > 0
        return [engine.url for engine, done in zip(self._engines, idle, strict=True) if all_busy or not done]

    async def _abort_all(self, engine: EngineState) -> bool:
        """Ask an engine to end what runs; whether nothing does now. One that is down has nothing running."""
        limit = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
        body = {"abort_all": True}
        try:
            async with self._connected().post(f"{engine.url}/abort_request", json=body, timeout=limit) as aborted:
                await aborted.read()
            # It refuses while a request lives; the cache is of no use to the next policy.
            async with self._connected().post(f"{engine.url}/flush_cache", timeout=limit) as flushed:
                return flushed.status == 200
        except TimeoutError:
            return False
        except aiohttp.ClientError:
            return True

    async def _version(self, engine: EngineState) -> int:
        """The policy version an engine has now."""
        limit = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
        async with self._connected().get(f"{engine.url}/model_info", timeout=limit) as response:
            response.raise_for_status()
            return version_of(await response.json())

    async def _leave_router(self, key: str) -> None:
        """Send requests with that key past the router, which keeps it for an engine with old weights.

        It alone knows which one that is: none is used before it was looked at.
        """
        if key in self._past_router:
            return  # another path of its tree has found out
        self._past_router.add(key)
        for engine in self._engines:
            engine.suspect = True
        await asyncio.gather(*map(self._look, self._engines))  # also at those to which no tree would go now

    async def _look(self, engine: EngineState) -> None:
        """Have an engine rest if it has old weights, and tell of it."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # down: whoever restarts it knows
            stale = await self._version(engine) < self.version
            if stale and engine.failed(asyncio.get_running_loop().time()) and self.on_stale is not None:
                self.on_stale(engine.url)

    def _check_version(self, version: int) -> None:
        if version < self.version:
            raise _StaleError("stale", f"it serves policy {version}, not {self.version}: a push is missing")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        return self._session


class _PassingError(Exception):
    """A condition that may be over soon: its short name, and more about it."""


class _StaleError(_PassingError):
    """An engine has older weights than were asked for."""


async def _read(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON of an answer. Raises _PassingError where it is none (cut, say), or not what SGLang answers."""
    try:
        answer: dict[str, Any] = await response.json()
        meta = answer["meta_info"]
        if not {"prompt_tokens", "cached_tokens"} <= meta.keys() or "type" not in meta["finish_reason"]:
            raise KeyError("prompt_tokens, cached_tokens, finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _PassingError("unreadable", f"{type(error).__name__}: {error}") from error
    return answer


def _reason(error: Exception) -> str:
    """The key under which a failed attempt is counted."""
    if isinstance(error, _PassingError):
        return str(error.args[0])
    return "timeout" if isinstance(error, TimeoutError) else "connection"


def _text(error: Exception) -> str:
    return ": ".join(str(part) for part in error.args if part) or type(error).__name__
