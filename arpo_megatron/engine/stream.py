"""One generation of an SGLang server, token by token as it is sampled."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp

from arpo_megatron.engine.exchange import server_events
from arpo_megatron.engine.request import EngineFinish, EngineRefusedError, Sampling, read_finish, version_of
from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.engine.wire.endpoints import bearer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """Tokens of a generation so far."""

    token_ids: tuple[int, ...]
    """All sampled tokens up to now, the stop string's included."""
    finish: EngineFinish | None
    """Why the generation ended; None while it runs."""
    matched: str | None = None
    """The stop string that ended it, if one did."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each token in nats, if they were asked for."""
    entropies: tuple[float, ...] = ()
    """Entropy of the distribution of each token in nats, if the engine computes it."""
    weight_version: int = 0
    """Version of the weights."""


async def stream_generation(
    session: aiohttp.ClientSession,
    url: str,
    token: str | None,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    logprobs: bool = False,
) -> AsyncIterator[StreamedTokens]:
    """Yield the tokens of one generation, each time with all before; the last item has `finish`.

    Args:
        session: HTTP client.
        url: http://host:port of the engine.
        token: bearer token of the engine.
        input_ids: the prompt.
        max_new_tokens: most tokens to sample.
        sampling: how tokens are drawn.
        stop: strings that end the generation.
        logprobs: ask for the log-probs of the tokens, too.

    Raises:
        EngineRefusedError: the engine does not accept the request, or ends it without a reason.
        aiohttp.ClientError: the engine cannot be reached.
    """
    parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens, "stop": list(stop)}
    body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": parameters, "stream": True}
    if logprobs:
        body["return_logprob"] = True
    read = _Reader()
    async with session.post(f"{url}/generate", json=body, headers=bearer(token)) as response:
        if response.status != 200:
            raise EngineRefusedError(f"HTTP {response.status}: {(await response.text(errors='replace'))[:500]}")
        async for event in server_events(response.content):
            answer = json.loads(event)
            if "meta_info" not in answer:
                raise EngineRefusedError(str(answer.get("error", answer))[:500])
            streamed = read.add(answer.get("output_ids") or [], answer["meta_info"])
            yield streamed
            if streamed.finish is not None:
                return
    raise EngineRefusedError("the engine ended the stream without a reason")


class _Reader:
    """Puts the parts of a stream together. Engines send all values each time, or only the new ones."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []

    def add(self, ids: Sequence[int], meta: Mapping[str, Any]) -> StreamedTokens:
        count = int(meta["completion_tokens"])
        self._ids = _joined(self._ids, ids, count)
        self._logprobs = _joined(self._logprobs, [each[0] for each in meta.get("output_token_logprobs") or ()], count)
        self._entropies = _joined(self._entropies, meta.get(META_KEY) or (), count)
        reason = meta.get("finish_reason")
        finish, matched = None, None
        if reason is not None:
            if reason.get("status_code") == HTTPStatus.BAD_REQUEST:
                raise EngineRefusedError(str(reason.get("message"))[:500])
            finish, matched = read_finish(reason)
        values = tuple(self._ids), finish, matched, tuple(self._logprobs), tuple(self._entropies)
        return StreamedTokens(*values, version_of(meta))


def _joined(before: list[T], new: Sequence[T], count: int) -> list[T]:
    return list(new) if len(new) == count else [*before, *new]
