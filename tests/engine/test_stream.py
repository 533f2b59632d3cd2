"""A generation that arrives in parts."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from arpo_megatron.engine.request import EngineFinish, Sampling
from arpo_megatron.engine.stream import StreamedTokens, stream_generation

COUNT = 30_000


def part(begin: int, end: int, reason: dict[str, Any] | None) -> bytes:
    meta = {"completion_tokens": end, "finish_reason": reason, "weight_version": "3"}
    meta |= {"output_token_logprobs": [[-0.5, token, None] for token in range(begin, end)]}
    meta |= {"entropy": [token / 10 for token in range(begin, end)]}
    return f"data: {json.dumps({'output_ids': list(range(begin, end)), 'meta_info': meta})}\n\n".encode()


@pytest.mark.parametrize("whole", [True, False], ids=["all tokens each time", "only the new ones"])
def test_long_generation_arrives_whole(whole: bool) -> None:
    """With all tokens each time, a line grows to more than a megabyte."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for begin in range(0, COUNT, 10_000):
            end = begin + 10_000
            await response.write(part(0 if whole else begin, end, {"type": "length"} if end == COUNT else None))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def run() -> list[StreamedTokens]:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                wanted = stream_generation(
                    session, url, None, [1], max_new_tokens=COUNT, sampling=Sampling(), stop=(), logprobs=True
                )
                return [each async for each in wanted]
        finally:
            await runner.cleanup()

    found = asyncio.run(run())
    assert [len(each.token_ids) for each in found] == [10_000, 20_000, 30_000]
    assert found[-1].token_ids == tuple(range(COUNT)) and found[-1].finish is EngineFinish.LENGTH
    assert found[-1].logprobs == (-0.5,) * COUNT and found[-1].entropies[-1] == (COUNT - 1) / 10
    assert found[-1].weight_version == 3
