"""Sizes and times of a running engine, for `plan.simulate`."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.plan.simulated_engine import EngineModel

PROMPT, TOKENS = 16, 96
LONG, ROUNDS = 1024, 3
FIRST_ID, IDS = 20, 800


async def measure_engine(client: EngineClient) -> EngineModel:
    """Return the model of an idle engine, from prefills of two lengths and decoding alone and in a full batch."""
    ((_, capacity),) = await client.capacities()
    draw = np.random.default_rng(1)

    async def prefill(length: int) -> float:
        began = time.monotonic()
        await client.prefill(draw.integers(FIRST_ID, IDS, length).astype(np.int32))
        return time.monotonic() - began

    async def decode(batch: int) -> float:
        """Return the seconds of a step with this many requests."""

        async def one() -> int:
            prompt = draw.integers(FIRST_ID, IDS, PROMPT).astype(np.int32)
            return len((await client.generate(prompt, max_new_tokens=TOKENS, sampling=Sampling())).token_ids)

        began = time.monotonic()
        tokens = await asyncio.gather(*(one() for _ in range(batch)))
        return (time.monotonic() - began) / max(tokens)

    long = min(LONG, capacity.tokens // 4)
    full = min(capacity.requests, capacity.tokens // (2 * (PROMPT + TOKENS)))
    await decode(full)  # warms the engine up
    short_s, long_s = await _best(prefill, PROMPT), await _best(prefill, long)
    alone_s, full_s = await _best(decode, 1), await _best(decode, full)
    request_s = max(0.0, full_s - alone_s) / (full - 1)
    return EngineModel(
        tokens=capacity.tokens,
        requests=capacity.requests,
        step_s=alone_s - request_s,
        request_s=request_s,
        prefill_s=max(0.0, long_s - short_s) / (long - PROMPT),
        batch_s=short_s,
    )


async def _best(measure: Callable[[int], Awaitable[float]], size: int) -> float:
    return min([await measure(size) for _ in range(ROUNDS)])
