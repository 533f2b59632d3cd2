"""Speaking to one SGLang server: token ids in, token ids out.

Text never decides what the tokens are: `Generation.token_ids` is what the engine sampled, also where a stop string
ends inside a token. Requests that fail on the way are repeated; sampling anew is harmless, since nothing of a lost
answer was used.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import aiohttp
import numpy as np

from arpo_megatron.rollout.sglang_plugin import META_KEY
from arpo_megatron.tree import Float32Array, Int32Array

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_ABORT_INTERVAL_S = 0.05
_PASSING_STATUSES = frozenset({502, 503, 504})  # starting, shutting down, or a router without a worker


class EngineUnavailableError(RuntimeError):
    """No answer after all repetitions: the engine is gone, hangs, or aborts what it is asked."""


class EngineRefusedError(RuntimeError):
    """The engine will never accept this request (too long, for instance); repeating it is pointless."""


class EngineFinish(StrEnum):
    """Why the engine stopped a generation."""

    STOP_STRING = "stop_string"  # `Generation.matched` says which
    END_TOKEN = "end_token"  # noqa: S105  the model's end-of-sequence token, the last of token_ids
    LENGTH = "length"
    CUT_SHORT = "cut_short"  # by `EngineClient.pause`; the tokens so far are as good as any


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
    """

    token_ids: Int32Array
    logprobs: Float32Array
    entropies: Float32Array
    finish: EngineFinish
    matched: str | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; log-probs and entropies are then those of temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0

    def as_request(self) -> dict[str, Any]:
        """SGLang's `sampling_params`; special tokens stay in the text in which stop strings are looked for."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }


class EngineClient:
    """Client of the server at `url`, for one event loop. Use as `async with`.

    Args:
        url: http://host:port.
        request_timeout_s: deadline of one attempt.
        retry_for_s: how long an unreachable engine is waited for (it may be restarting) before a request fails.

    Attributes:
        version: oldest policy whose tokens are accepted.
    """

    def __init__(self, url: str, *, request_timeout_s: float = 600.0, retry_for_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self.version = 0
        self._open = asyncio.Event()
        self._open.set()
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
            EngineUnavailableError: the engine does not end them.
        """
        self._open.clear()
        give_up = asyncio.get_running_loop().time() + self._retry_for_s
        # Again and again: a request may have been on its way when the last abort was said, and one whose asker was
        # cancelled is known to the engine alone.
        while not await self._idle_after_abort():
            if asyncio.get_running_loop().time() > give_up:
                raise EngineUnavailableError(f"the engine at {self.url} does not end its requests")
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_INTERVAL_S)

    def resume(self, version: int) -> None:
        """Let requests pass again; answers come from policy `version` or a later one."""
        self.version = version
        self._open.set()

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids`, ending early behind any of the `stop` strings.

        The answer may be shorter for a `pause`; then `finish` says so, and whoever asks again waits for `resume`.

        Raises:
            EngineUnavailableError: no answer after all repetitions.
            EngineRefusedError: the request itself is at fault.
        """
        parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens}
        if stop:
            parameters["stop"] = list(stop)
        answer = await self._request(
            {"input_ids": _plain(input_ids), "sampling_params": parameters, "return_logprob": True}
        )
        generation = _generation(answer)
        if generation.weight_version < self.version:
            raise EngineRefusedError(
                f"the engine serves policy {generation.weight_version}, not {self.version}: a push is missing"
            )
        return generation

    async def prefill(self, input_ids: Sequence[int] | Int32Array) -> tuple[int, int]:
        """Put a prefix into the radix cache, sampling nothing; returns (prompt tokens, of which were cached).

        Requests that start at once from a prefix nobody has prefilled would each compute it.
        """
        answer = await self._request({"input_ids": _plain(input_ids), "sampling_params": {"max_new_tokens": 0}})
        return int(answer["meta_info"]["prompt_tokens"]), int(answer["meta_info"]["cached_tokens"])

    async def score(self, token_ids: Sequence[int] | Int32Array) -> Float32Array:
        """float32[n]: log-prob in nats at temperature 1 of each token given those before it; NaN for the first.

        Computed without the radix cache, with the weights the engine has now.
        """
        answer = await self._request(
            {
                "input_ids": _plain(token_ids),
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
        )
        entries = answer["meta_info"]["input_token_logprobs"]
        return np.array([np.nan if entry[0] is None else entry[0] for entry in entries], dtype=np.float32)

    async def _request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /generate until it is answered, refused, or given up."""
        if self._session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._retry_for_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            if not self._open.is_set():
                await self._open.wait()
                give_up = loop.time() + self._retry_for_s
            try:
                return await self._attempt(self._session, body)
            except (aiohttp.ClientError, TimeoutError, _PassingError) as error:
                if loop.time() + backoff_s > give_up:
                    reason = str(error) or type(error).__name__
                    raise EngineUnavailableError(f"the engine at {self.url} does not answer: {reason}") from error
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _idle_after_abort(self) -> bool:
        """Abort all requests; whether none is left, here and in the engine."""
        if self._session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        try:
            async with self._session.post(f"{self.url}/abort_request", json={"abort_all": True}) as aborted:
                await aborted.read()
            if self._in_flight:
                return False
            # It refuses while a request lives; the cache is of no use to the next policy.
            async with self._session.post(f"{self.url}/flush_cache") as flushed:
                return flushed.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _attempt(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> dict[str, Any]:
        self._in_flight += 1
        try:
            return await self._exchange(session, body)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _exchange(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> dict[str, Any]:
        async with session.post(f"{self.url}/generate", json=body) as response:
            if response.status in _PASSING_STATUSES:
                raise _PassingError(f"HTTP {response.status}")
            if response.status != 200:
                raise EngineRefusedError(f"HTTP {response.status} from the engine: {(await response.text())[:500]}")
            answer: dict[str, Any] = await response.json()
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort" and (self._open.is_set() or not answer.get("output_ids")):
            raise _PassingError(f"the engine aborted the request: {finish.get('message', '')}")
        return answer


class _PassingError(Exception):
    """A condition that may be over soon."""


def _plain(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _generation(answer: Mapping[str, Any]) -> Generation:
    """The engine's JSON as a `Generation`. Raises EngineRefusedError where it lacks what every answer must have."""
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
    version = str(meta.get("weight_version", ""))
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        entropies=entropies,
        finish=finish,
        matched=matched if isinstance(matched, str) else None,
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        weight_version=int(version) if version.isdecimal() else 0,
    )
