"""Answers of the real engine while its KV pool is too small: prefixes are evicted and running requests retracted."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.engine.request import Generation, Sampling
from tests.engine.fixtures import ENGINE

if TYPE_CHECKING:
    from torch import Tensor

POOL = 1200
REQUESTS = 12
NEW_TOKENS = 260


@pytest.mark.slow_campaign
def test_answers_are_right_under_evictions_and_retractions(
    tiny_model: Path, tmp_path: Path, reference: "Callable[[list[int]], Tensor]"
) -> None:
    """Every token has its log-prob and its entropy, and they are those of the model."""
    log = tmp_path / "engine.log"
    engine = replace(ENGINE, max_total_tokens=POOL, max_running_requests=REQUESTS)
    draw = np.random.default_rng(1)
    prompts = [draw.integers(9, 28, 150).astype(np.int32) for _ in range(REQUESTS)]

    async def run(url: str) -> tuple[list[Generation], list[Generation]]:
        async with EngineClient(url) as client:
            assert [capacity.tokens for _, capacity in await client.capacities()] == [POOL]

            async def sample(prompt: np.ndarray) -> Generation:
                return await client.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=Sampling())

            first = await asyncio.gather(*map(sample, prompts))
            longer = [np.concatenate([p, g.token_ids]) for p, g in zip(prompts, first, strict=True)]
            return first, list(await asyncio.gather(*map(sample, longer)))

    with launch_engine(tiny_model, engine, dtype="float32", seed=1, log_path=log) as handle:
        first, second = asyncio.run(run(handle.url))
    assert "etract" in log.read_text(), "the pool was not too small"
    assert sum(answer.cached_tokens for answer in second) < sum(answer.prompt_tokens for answer in second) // 2
    for prompt, before, answer in zip(prompts, first, second, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.entropies) > 0
        ids = [*prompt.tolist(), *before.token_ids.tolist(), *answer.token_ids.tolist()]
        logits = reference(ids).log_softmax(-1)
        for given, part in ((len(prompt), before), (len(prompt) + len(before.token_ids), answer)):
            rows = logits[given - 1 : given - 1 + len(part.token_ids)]
            chosen = rows[range(len(part.token_ids)), part.token_ids.tolist()]
            np.testing.assert_allclose(part.logprobs, chosen.numpy(), atol=1e-3)
            np.testing.assert_allclose(part.entropies, -(rows.exp() * rows).sum(-1).numpy(), atol=1e-3)
