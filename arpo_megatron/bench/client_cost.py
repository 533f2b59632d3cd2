"""CPU time of the engine client for one request with a long prompt, against a server that answers at once.

As in a tree, the prompt is a path of segments: each was written as JSON by the request before.
"""

import asyncio
import time

import numpy as np

from arpo_megatron.bench.stub_engine import StubSettings, launch_stub
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.node import Node
from arpo_megatron.tree import Role
from arpo_megatron.utils.signals import run_in_loop

ANSWER_TOKENS = 300
PROMPT_TOKENS = 16_000
ROUNDS, PARALLEL, SEGMENTS = 8, 32, 12


def client_ms() -> float:
    """Return the CPU milliseconds of this process for a request of `PROMPT_TOKENS` with `ANSWER_TOKENS` sampled."""
    with launch_stub(StubSettings(call=20, segment=ANSWER_TOKENS, answer_s=0.0)) as url:
        return run_in_loop(_measure(url))


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
                stop=("</python>",),
                key="0/t",
                encoded=node.encoded_path(),
            )

        await asyncio.gather(*(one() for _ in range(PARALLEL)))
        before = time.process_time()
        for _ in range(ROUNDS):
            await asyncio.gather(*(one() for _ in range(PARALLEL)))
        return 1e3 * (time.process_time() - before) / (ROUNDS * PARALLEL)
