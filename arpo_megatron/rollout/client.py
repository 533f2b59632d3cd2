"""Speaking to SGLang servers: token ids in, token ids out.

Text never decides what the tokens are: `Generation.token_ids` is what the engine sampled, also where a stop string
ends inside a token. Requests that fail on the way are repeated; sampling anew is harmless, since nothing of a lost
answer was used.

Requests with one routing key go to one engine (`routing`), so that what a tree has prefilled is in the cache of the
engine its siblings go to. An engine that fails rests for a while, and its trees go to another one meanwhile.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import aiohttp
import numpy as np

from arpo_megatron.rollout.routes import RouteRequest
from arpo_megatron.rollout.routing import ROUTING_KEY_HEADER, Engine, place
from arpo_megatron.rollout.sglang_plugin import META_KEY
from arpo_megatron.tree import Float32Array, Int16Array, Int32Array

_ABORT_INTERVAL_S = 0.05
_LOOK_TIMEOUT_S = 5.0
_LEAST_PATIENCE_S = 1.0
"""With the slower engines, where another one has prefilled what all trees begin with."""
_PASSING_STATUS = 500  # and above: starting, shutting down, weights arriving, a router without an engine


class EngineUnavailableError(RuntimeError):
    """No answer after all repetitions: the engines are gone, hang, abort what they are asked, or lack the weights."""


class EngineRefusedError(RuntimeError):
    """The engine will never accept this request (too long, for instance); repeating it is pointless."""


class EngineFinish(StrEnum):
    """Why the engine stopped a generation."""

    STOP_STRING = "stop_string"  # `Generation.matched` says which
    END_TOKEN = "end_token"  # noqa: S105  the model's end-of-sequence token, the last of token_ids
    LENGTH = "length"
    CUT_SHORT = "cut_short"  # by `EngineClient.pause`; without the last token, see `_generation`


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of the engine.

    Attributes:
        token_ids: int32[n], as sampled, stop tokens included.
        logprobs: float32[n], log softmax(logits / temperature) of each sampled token, in nats.
        entropies: float32[n], entropy in nats of each of those distributions, over the whole vocabulary.
        finish: why it ended.
        matched: the stop string, where one ended it.
        prompt_tokens: tokens sent.
        cached_tokens: how many of those the radix cache served.
        weight_version: the version of the weights that sampled it; a push waits until there is no request.
        routes: int16[k, layers, top_k], as asked for; None: not asked for, or cut short before they were known.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    entropies: Float32Array
    finish: EngineFinish
    matched: str | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: int
    routes: Int16Array | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; log-probs and entropies are then those of temperature 1.

    `seed` counts where the engine samples deterministically (`engine.deterministic`); without one, equal prompts would
    be continued equally there.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def as_request(self) -> dict[str, Any]:
        """SGLang's `sampling_params`; special tokens stay in the text in which stop strings are looked for."""
        parameters: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        return parameters if self.seed is None else parameters | {"sampling_seed": self.seed}


class EngineClient:
    """Client of the servers at `urls`, which serve the same policy, for one event loop. Use as `async with`.

    Args:
        urls: http://host:port of each engine.
        router: of SGLang's router before them, through which generations go then; None: this client distributes them.
        request_timeout_s: deadline of one attempt.
        retry_for_s: how long after its first failure a request is repeated (an engine may be restarting). Waiting for a
            push (`on_stale`) does not count.

    Attributes:
        on_stale: called with the URL of an engine that serves an older policy than `version`, whenever one is met;
            requests wait for the push that follows. None: nobody pushes, and they fail.
        version: oldest policy whose tokens are accepted. What an engine with an older one answers (a restarted engine
            is such) is thrown away and asked for again.
        repeated: attempts that had to be repeated, by reason ("connection", "timeout", "HTTP 503", "abort", "stale").
    """

    def __init__(
        self,
        *urls: str,
        router: str | None = None,
        request_timeout_s: float = 600.0,
        retry_for_s: float = 60.0,
    ) -> None:
        self.version = 0
        self.repeated: Counter[str] = Counter()
        self._engines = tuple(Engine(url.rstrip("/")) for url in urls)
        self._targets = self._engines if router is None else (Engine(router.rstrip("/")),)
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
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
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
        self._gate.set()

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        key: str = "",
        routes: RouteRequest | None = None,
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

        Raises:
            EngineUnavailableError: no answer after all repetitions.
            EngineRefusedError: the request itself is at fault.
            ValueError: the engine does not return the routes.
        """
        parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens}
        if stop:
            parameters["stop"] = list(stop)
        body = {"input_ids": _plain(input_ids), "sampling_params": parameters, "return_logprob": True}
        if routes is not None:
            body |= routes.as_request()
        return _generation(await self._request(body, key), routes)

    async def prefill(self, input_ids: Sequence[int] | Int32Array, *, key: str = "") -> tuple[int, int]:
        """Put a prefix into the radix cache, sampling nothing; returns (prompt tokens, of which were cached).

        Requests that start at once from a prefix nobody has prefilled would each compute it.
        """
        return _prefilled(await self._request(_prefill_body(input_ids), key))

    async def prefill_everywhere(self, input_ids: Sequence[int] | Int32Array) -> list[tuple[int, int]]:
        """As `prefill`, on every engine: for what all trees begin with.

        An engine that does not answer goes without, also one that takes much longer than the first.

        Raises:
            EngineUnavailableError: none of them answered.
            EngineRefusedError: the request itself is at fault.
        """
        if len(self._engines) == 1:
            return [await self.prefill(input_ids)]
        body = _prefill_body(input_ids)
        await self._gate.wait()
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
        ended = [task for task in asked if not task.cancelled() and task.exception() is None]
        # Else it says why, or waits until one is up again.
        return [_prefilled(task.result()) for task in ended] or [await self.prefill(input_ids)]

    async def _request(self, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        """POST /generate until it is answered with a policy new enough, refused, or given up."""
        clock = asyncio.get_running_loop().time
        give_up = float("inf")
        while True:
            if not self._gate.is_set():
                await self._gate.wait()
                give_up = float("inf")
            engine = place(key, self._targets, clock())
            if (rest_s := engine.rests_until - clock()) > 0:
                await asyncio.sleep(rest_s)
                continue  # another one may be up by now, or none asked
            try:
                if engine.suspect and self.version and engine in self._engines:
                    self._check_version(await self._version(engine))
                    if not self._gate.is_set():
                        continue  # a pause has begun meanwhile, and may have seen no request
                answer = await self._attempt(engine, body, key)
                self._check_version(_version_of(answer["meta_info"]))
            except (aiohttp.ClientError, TimeoutError, _PassingError) as error:
                if not self._gate.is_set():
                    continue  # the pause has cut it short
                self.repeated[_reason(error)] += 1
                first = engine.failed(clock())
                if isinstance(error, _StaleError) and self.on_stale is not None:
                    if first:
                        await self._tell_stale(engine, self.on_stale)
                    continue  # however long the push takes to come
                give_up = min(give_up, clock() + self._retry_for_s)
                if clock() >= give_up:
                    text = f"the engine at {engine.url} does not answer: {_text(error)}"
                    raise EngineUnavailableError(text) from error
            else:
                engine.answered()
                return answer

    async def _attempt(self, engine: Engine, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        self._in_flight += 1
        try:
            return await self._exchange(engine, body, key)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _exchange(self, engine: Engine, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        headers = {ROUTING_KEY_HEADER: key} if key else {}
        async with self._connected().post(f"{engine.url}/generate", json=body, headers=headers) as response:
            if response.status >= _PASSING_STATUS:
                raise _PassingError(f"HTTP {response.status}", (await response.text(errors="replace"))[:200])
            if response.status != 200:
                raise EngineRefusedError(f"HTTP {response.status} from the engine: {(await response.text())[:500]}")
            answer: dict[str, Any] = await response.json()
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort" and (self._gate.is_set() or len(answer.get("output_ids") or []) < 2):
            raise _PassingError("abort", str(finish.get("message", "")))
        return answer

    async def _busy_after_abort(self) -> list[str]:
        """Abort all requests everywhere; URLs of the engines that may still have some."""
        idle = await asyncio.gather(*map(self._abort_all, self._engines))
        all_busy = self._in_flight > 0
        return [engine.url for engine, done in zip(self._engines, idle, strict=True) if all_busy or not done]

    async def _abort_all(self, engine: Engine) -> bool:
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

    async def _version(self, engine: Engine) -> int:
        """The policy version an engine has now."""
        limit = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
        async with self._connected().get(f"{engine.url}/model_info", timeout=limit) as response:
            response.raise_for_status()
            return _version_of(await response.json())

    async def _tell_stale(self, engine: Engine, tell: Callable[[str], None]) -> None:
        """`tell` about the engine; behind a router, about each that has old weights."""
        if engine in self._engines:
            tell(engine.url)
            return
        for each in self._engines:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # down: whoever restarts it knows
                if await self._version(each) < self.version:
                    tell(each.url)

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


def _reason(error: Exception) -> str:
    """The key under which a failed attempt is counted."""
    if isinstance(error, _PassingError):
        return str(error.args[0])
    return "timeout" if isinstance(error, TimeoutError) else "connection"


def _text(error: Exception) -> str:
    return ": ".join(str(part) for part in error.args if part) or type(error).__name__


def _version_of(fields: Mapping[str, Any]) -> int:
    version = str(fields.get("weight_version", ""))
    return int(version) if version.isdecimal() else 0


def _prefill_body(input_ids: Sequence[int] | Int32Array) -> dict[str, Any]:
    return {"input_ids": _plain(input_ids), "sampling_params": {"max_new_tokens": 0}}


def _prefilled(answer: Mapping[str, Any]) -> tuple[int, int]:
    return int(answer["meta_info"]["prompt_tokens"]), int(answer["meta_info"]["cached_tokens"])


def _plain(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _generation(answer: Mapping[str, Any], asked: RouteRequest | None) -> Generation:
    """The engine's JSON as a `Generation`. Raises EngineRefusedError where it lacks what every answer must have.

    Of an answer that was cut short the last token is left out. It may have been the end, a stop string's or the
    sequence's, and SGLang does not say so: it reports the abort instead. Whoever goes on samples it anew.
    """
    meta = answer["meta_info"]
    token_ids = np.array(answer["output_ids"], dtype=np.int32)
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)
    entropies = np.array(meta.get(META_KEY) or [], dtype=np.float32)
    if not len(token_ids) == len(logprobs) == len(entropies):
        raise EngineRefusedError(
            f"the engine answered {len(token_ids)} tokens with {len(logprobs)} log-probs and {len(entropies)} "
            "entropies: was it started with arpo_megatron.rollout.sglang_main?"
        )
    reason = meta["finish_reason"]
    matched = reason.get("matched")
    if reason["type"] == "length":
        finish = EngineFinish.LENGTH
    elif reason["type"] == "abort":
        finish = EngineFinish.CUT_SHORT
    else:
        finish = EngineFinish.STOP_STRING if isinstance(matched, str) else EngineFinish.END_TOKEN
    routes = None if asked is None else asked.read(meta, len(token_ids))
    if finish is EngineFinish.CUT_SHORT:
        token_ids, logprobs, entropies = token_ids[:-1], logprobs[:-1], entropies[:-1]
        routes = None if routes is None else routes[:-1]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        entropies=entropies,
        finish=finish,
        matched=matched if isinstance(matched, str) else None,
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        weight_version=_version_of(meta),
        routes=routes,
    )
