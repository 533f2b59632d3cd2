"""One attempt of a generation: the HTTP exchange with an engine, and the meaning of its failures.

A streamed answer arrives in pieces, each with all tokens so far. The server sends the first token, the first
`FirstTokensListener.count` + 1 tokens, and the whole answer (`server/stream.py`). The first piece shows that the
request runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import orjson

from arpo_megatron.engine.affinity import EngineState
from arpo_megatron.engine.request import EngineRefusedError, encode_request, version_of
from arpo_megatron.engine.wire.endpoints import INCARNATION_HEADER

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 5.0
_MIN_STRAGGLER_WAIT_S = 1.0
"""Time that `quick_answers` leaves the slower engines after the first has answered, at least."""
QUEUE_FACTOR = 10.0
"""An accepted request may wait this many times its deadline in the engine's queue. Only a lost request does."""
_TRANSIENT_STATUS = 500  # and above: starting, shutting down, weights arriving, a router without an engine
_ALSO_TRANSIENT = (408, 425, 429)  # timeout, too early, too many requests: from a proxy or router


class TransientError(Exception):
    """A failure that may pass. Arguments: the reason under which it is counted, and details."""


class StaleError(TransientError):
    """An engine has older weights than the client accepts."""


@dataclass(slots=True)
class FirstTokensListener:
    """A request to hear of the first tokens of an answer while the engine samples the rest."""

    count: int
    """Number of tokens, at least 1."""
    call: Callable[[dict[str, Any]], bool]
    """Called with an answer that has more than `count` tokens until it returns True; not if a whole answer is first."""
    answer: dict[str, Any] | None = None
    """The answer with which `call` has returned True."""

    def offer(self, answer: dict[str, Any]) -> None:
        """Call `call` if the answer is the first with enough tokens.

        One token more is needed: the last one of an answer that is cut short is sampled again.
        """
        if self.answer is None and len(answer.get("output_ids") or []) > self.count and self.call(answer):
            self.answer = answer


async def post_generation(
    session: aiohttp.ClientSession,
    engine: EngineState,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    first: FirstTokensListener | None,
) -> dict[str, Any]:
    """Send a request once and return its whole answer; set `engine.incarnation`.

    Args:
        session: HTTP client.
        engine: where it is sent.
        body: the request, see `encode_request`; streamed if it has `stream`.
        headers: headers of the request.
        timeout_s: deadline. That of a streamed request starts when the request starts to run.
        first: receives the first tokens of a streamed answer.

    Raises:
        TransientError: the engine failed.
        EngineRefusedError: the request is at fault.
        aiohttp.ClientError: the connection failed.
        TimeoutError: the engine is alive and took too long.
    """
    loop = asyncio.get_running_loop()
    content = encode_request(body)
    headers = {"Content-Type": "application/json", **headers}
    async with asyncio.timeout(timeout_s) as deadline:
        async with session.post(f"{engine.url}/generate", data=content, headers=headers) as response:
            known = response.headers.get(INCARNATION_HEADER)
            if response.status >= _TRANSIENT_STATUS or response.status in _ALSO_TRANSIENT:
                engine.incarnation = known
                raise TransientError(f"HTTP {response.status}", (await response.text(errors="replace"))[:200])
            engine.incarnation = known or ""
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                raise EngineRefusedError(f"HTTP {response.status} from the engine: {text}")
            if not body.get("stream"):
                return _checked(await response.read())
            deadline.reschedule(loop.time() + QUEUE_FACTOR * timeout_s)
            runs = False
            async for event in server_events(response.content):
                answer = _checked(event)
                if answer["meta_info"]["finish_reason"] is not None:
                    return answer
                if not runs:
                    deadline.reschedule(loop.time() + timeout_s)
                    runs = True
                if first is not None:
                    first.offer(answer)
    raise TransientError("unreadable", "the stream ended early")


async def quick_answers(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Make requests to several engines; drop failures and engines that take much longer than the first."""
    started = asyncio.get_running_loop().time()
    attempts = [asyncio.create_task(request) for request in requests]
    waiting, done = set(attempts), list[asyncio.Task[T]]()
    try:
        while waiting and not done:
            answered, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in answered if task.exception() is None]
        if waiting:  # an engine that hangs must not delay the trees of the others
            took = asyncio.get_running_loop().time() - started
            await asyncio.wait(waiting, timeout=max(_MIN_STRAGGLER_WAIT_S, 2 * took))
    finally:
        for task in attempts:
            task.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
    return [task.result() for task in attempts if not task.cancelled() and task.exception() is None]


async def abort_all(session: aiohttp.ClientSession, url: str) -> bool:
    """Abort an engine's requests; return whether it is idle now. An engine that is down is idle."""
    limit = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    try:
        async with session.post(f"{url}/abort_request", json={"abort_all": True}, timeout=limit) as aborted:
            await aborted.read()
        # The engine refuses to flush while a request is running. If pushes keep the cache, it only answers whether it
        # is idle (server/gate.py); else the next policy cannot use the cache anyway.
        async with session.post(f"{url}/flush_cache", timeout=limit) as flushed:
            return flushed.status == 200
    except TimeoutError:
        return False
    except aiohttp.ClientError:
        return True


async def read_version(session: aiohttp.ClientSession, engine: EngineState) -> int:
    """Return the engine's current policy version, and note which process serves it."""
    limit = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    async with session.get(f"{engine.url}/model_info", timeout=limit) as response:
        response.raise_for_status()
        engine.incarnation = response.headers.get(INCARNATION_HEADER, "")
        return version_of(await response.json())


async def server_events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the JSON of each server-sent event, of any length: aiohttp's own reader refuses long lines."""
    rest = b""
    async for block in stream.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield event[6:]


def _checked(content: bytes) -> dict[str, Any]:
    """Return the answer's JSON. Raises TransientError if it is cut off or lacks SGLang's fields."""
    try:
        answer: dict[str, Any] = orjson.loads(content)
        if "meta_info" not in answer and "message" in answer.get("error", ""):
            raise EngineRefusedError(f"the engine refuses the request: {answer['error']['message'][:500]}")
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason.get("status_code") == HTTPStatus.BAD_REQUEST:  # HTTP 400 if it is not streamed
            raise EngineRefusedError(f"the engine refuses the request: {reason.get('message')}")
        if not {"prompt_tokens", "cached_tokens"} <= meta.keys() or (reason is not None and "type" not in reason):
            raise KeyError("prompt_tokens, cached_tokens, finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransientError("unreadable", f"{type(error).__name__}: {error}") from error
    return answer


def failure_reason(error: Exception) -> str:
    """Return the reason under which a failed attempt is counted."""
    if isinstance(error, TransientError):
        return str(error.args[0])
    return "timeout" if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError) else "connection"


def failure_message(error: Exception) -> str:
    """Return one line about a failed attempt."""
    return ": ".join(str(part) for part in error.args if part) or type(error).__name__
