"""One generation of an SGLang server, token by token as it is sampled."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp

from arpo_megatron.engine.request import EngineFinish, EngineRefusedError, Sampling
from arpo_megatron.engine.wire.endpoints import bearer


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """Tokens of a generation so far."""

    token_ids: tuple[int, ...]
    """All sampled tokens up to now, the stop string's included."""
    finish: EngineFinish | None
    """Why the generation ended; None while it runs."""
    matched: str | None = None
    """The stop string that ended it, if one did."""


async def stream_generation(
    session: aiohttp.ClientSession,
    url: str,
    token: str | None,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
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

    Raises:
        EngineRefusedError: the engine does not accept the request, or ends it without a reason.
        aiohttp.ClientError: the engine cannot be reached.
    """
    parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens, "stop": list(stop)}
    body = {"input_ids": list(input_ids), "sampling_params": parameters, "stream": True}
    sampled: list[int] = []
    async with session.post(f"{url}/generate", json=body, headers=bearer(token)) as response:
        if response.status != 200:
            raise EngineRefusedError(f"HTTP {response.status}: {(await response.text(errors='replace'))[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line[6:])
            if "meta_info" not in answer:
                raise EngineRefusedError(str(answer.get("error", answer))[:500])
            new = answer.get("output_ids") or []
            # Engines send all ids each time, or the new ones; the count in `meta_info` decides.
            whole = len(new) == int(answer["meta_info"]["completion_tokens"])
            sampled = list(new) if whole else [*sampled, *new]
            reason = answer["meta_info"].get("finish_reason")
            if reason is None:
                yield StreamedTokens(tuple(sampled), None)
                continue
            matched = reason.get("matched")
            text = matched if isinstance(matched, str) else None
            ended = EngineFinish.STOP_STRING if text is not None else EngineFinish.END_TOKEN
            kinds = {"length": EngineFinish.LENGTH, "abort": EngineFinish.CUT_SHORT}
            yield StreamedTokens(tuple(sampled), kinds.get(reason["type"], ended), text)
            return
    raise EngineRefusedError("the engine ended the stream without a reason")
