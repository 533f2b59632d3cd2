"""CPU time of the engine client for one request with a long prompt, against a server that answers at once.

As in a tree, the prompt is a path of segments: each was written as JSON by the request before.
"""

import asyncio
import subprocess
import sys
import time

import numpy as np

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Role
from arpo_megatron.utils.signals import run_in_loop

ANSWER_TOKENS = 300
PROMPT_TOKENS = 16_000
ROUNDS, PARALLEL, SEGMENTS = 8, 32, 12


def client_ms() -> float:
    """Return the CPU milliseconds of this process for a request of `PROMPT_TOKENS` with `ANSWER_TOKENS` sampled."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            return run_in_loop(_measure(f"http://127.0.0.1:{int(server.stdout.readline())}"))
        finally:
            server.kill()


async def _measure(url: str) -> float:
    prompt = np.random.default_rng(1).integers(0, 151_000, PROMPT_TOKENS).astype(np.int32)
    node = Node(Role.PROMPT, ())
    node.token_ids, *later = np.array_split(prompt, SEGMENTS)
    for tokens in later:
        node = node.add_child(Role.TOOL)
        node.token_ids = tokens
    async with EngineClient(url) as client:

        async def one() -> None:
            await client.generate(
                prompt,
                max_new_tokens=4000,
                sampling=Sampling(seed=1),
                stop=("</search>",),
                key="0/t",
                encoded=node.encoded_path(),
            )

        await asyncio.gather(*(one() for _ in range(PARALLEL)))
        before = time.process_time()
        for _ in range(ROUNDS):
            await asyncio.gather(*(one() for _ in range(PARALLEL)))
        return 1e3 * (time.process_time() - before) / (ROUNDS * PARALLEL)


async def _serve() -> None:
    import orjson

    draw = np.random.default_rng(2)
    ids = draw.integers(0, 151_000, ANSWER_TOKENS).tolist()
    numbers = draw.random(ANSWER_TOKENS).tolist()
    meta = {
        "finish_reason": {"type": "stop", "matched": "</search>"},
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": PROMPT_TOKENS - 1000,
        "weight_version": "0",
        "output_token_logprobs": [[-number, token, None] for number, token in zip(numbers, ids, strict=True)],
        META_KEY: numbers,
    }
    body = orjson.dumps({"text": "w " * ANSWER_TOKENS, "output_ids": ids, "meta_info": meta})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                await reader.readexactly(length)
                writer.write(head + body)
        except asyncio.IncompleteReadError:  # the client has closed the connection
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
