"""One attempt of a generation: the HTTP exchange with an engine, and the meaning of its failures.

A streamed answer arrives in pieces, each with all tokens so far. The server sends the first token, the first
`FirstTokens.count` + 1 tokens, and the whole answer (`server/stream.py`). The first piece shows that the request runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import orjson

from arpo_megatron.engine.affinity import EngineState
from arpo_megatron.engine.request import EngineRefusedError
from arpo_megatron.engine.wire.endpoints import INCARNATION_HEADER

CONNECT_TIMEOUT_S = 30.0
QUEUE_FACTOR = 10.0
"""An accepted request may wait this many times its deadline in the engine's queue. Only a lost request does."""
_TRANSIENT_STATUS = 500  # and above: starting, shutting down, weights arriving, a router without an engine
_ALSO_TRANSIENT = (408, 425, 429)  # timeout, too early, too many requests: from a proxy or router
_decode = msgspec.json.Decoder().decode


class TransientError(Exception):
    """A failure that may pass. Arguments: the reason under which it is counted, and details."""


class StaleError(TransientError):
    """An engine has older weights than the client accepts."""


@dataclass(slots=True)
class FirstTokens:
    """A request to hear of the first tokens of an answer while the engine samples the rest."""

    count: int
    """Number of tokens, at least 1."""
    call: Callable[[dict[str, Any]], None]
    """Called at most once, with an answer that has more than `count` tokens; not if a whole answer comes first."""
    answer: dict[str, Any] | None = None
    """The answer with which `call` was called."""

    def offer(self, answer: dict[str, Any]) -> None:
        """Call `call` if the answer is the first with enough tokens.

        One token more is needed: the last one of an answer that is cut short is sampled again.
        """
        if self.answer is None and len(answer.get("output_ids") or []) > self.count:
            self.answer = answer
            self.call(answer)


async def post_generation(
    session: aiohttp.ClientSession,
    engine: EngineState,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    first: FirstTokens | None,
) -> dict[str, Any]:
    """Send a request once and return its whole answer; set `engine.incarnation`.

    Args:
        session: HTTP client.
        engine: where it is sent.
        body: the request, with numpy arrays; streamed if it has `stream`.
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
    content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
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
            async for event in _events(response.content):
                answer = _checked(event)
                if answer["meta_info"]["finish_reason"] is not None:
                    return answer
                if not runs:
                    deadline.reschedule(loop.time() + timeout_s)
                    runs = True
                if first is not None:
                    first.offer(answer)
    raise TransientError("unreadable", "the stream ended early")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    rest = b""
    async for block in stream.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield event[6:]


def _checked(content: bytes) -> dict[str, Any]:
    """Return the answer's JSON. Raises TransientError if it is cut off or lacks SGLang's fields."""
    try:
        answer: dict[str, Any] = _decode(content)
        if "meta_info" not in answer and "message" in answer.get("error", ""):
            raise EngineRefusedError(f"the engine refuses the request: {answer['error']['message'][:500]}")
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
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
