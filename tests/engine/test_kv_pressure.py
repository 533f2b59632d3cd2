"""Answers of the real engine while its KV pool is too small: prefixes are evicted and running requests retracted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.expert_routes import ExpertRouteRequest
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.request import Generation, Sampling
from tests.engine.fixtures import ENGINE
from tests.engine.mixtures import SHAPE, write_mixture

if TYPE_CHECKING:
    from torch import Tensor

POOL = 1200
REQUESTS = 12
PROMPT_TOKENS = 150
NEW_TOKENS = 100
FIRST_TOKENS = 5
SMALL = replace(ENGINE, max_total_tokens=POOL, max_running_requests=REQUESTS)


@dataclass(frozen=True)
class PressedEngine:
    """An engine whose pool cannot hold the requests that it starts."""

    handle: EngineHandle
    model: Path
    log: Path

    def retractions(self) -> int:
        return self.log.read_text().count("Retract requests")

    @asynccontextmanager
    async def client(self, *, streams: bool = False) -> AsyncIterator[EngineClient]:
        """Connect to the engine; fail if no request is retracted meanwhile."""
        before = self.retractions()
        async with EngineClient(self.handle.url, streams=streams) as client:
            assert [capacity.tokens for _, capacity in await client.capacities()] == [POOL]
            yield client
            assert client.retries == {}
        assert self.retractions() > before, "the pool was not too small"


@contextmanager
def launched(model: Path, log: Path, **options: Any) -> Iterator[PressedEngine]:
    """Launch an engine that starts requests as if they sampled 16 tokens, so it retracts some when they sample more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "16")
        handle = launch_engine(model, SMALL, dtype="float32", seed=1, log_path=log, **options)
    with handle:
        yield PressedEngine(handle, model, log)


@pytest.fixture(scope="module")
def pressed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PressedEngine]:
    folder = tmp_path_factory.mktemp("pressed")
    # The end is one of 512 tokens, so answers grow until the pool is full.
    model, log = write_mixture(folder / "model", tiny_model, vocab_size=512), folder / "engine.log"
    with launched(model, log, expert_routes=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def mixture(pressed: PressedEngine) -> "Callable[[list[int]], tuple[Tensor, np.ndarray]]":
    """A function of token ids: float64[n, V] logits of transformers, and the experts [n, layers, top_k] in order."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pressed.model, experts_implementation="eager").double()

    def compute(ids: list[int]) -> "tuple[Tensor, np.ndarray]":
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_router_logits=True)
        experts = [layer.topk(SHAPE.top_k).indices.sort(-1).values for layer in found.router_logits]
        return found.logits[0], torch.stack(experts, 1).numpy()

    return compute


def draw_prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.integers(9, 28, PROMPT_TOKENS).astype(np.int32) for _ in range(REQUESTS)]


async def sample(
    client: EngineClient, prompts: Sequence[np.ndarray], each: Sequence[dict[str, Any]] = ()
) -> list[Generation]:
    """Continue all prompts at the same time; `each` has further arguments of their requests."""

    async def answer(prompt: np.ndarray, more: dict[str, Any]) -> Generation:
        return await client.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=Sampling(), **more)

    return list(await asyncio.gather(*map(answer, prompts, each or [{}] * len(prompts))))


def joined(prompts: Sequence[np.ndarray], answers: Sequence[Generation]) -> list[np.ndarray]:
    return [np.concatenate([prompt, answer.token_ids]) for prompt, answer in zip(prompts, answers, strict=True)]


def check_values(logits: "Tensor", prompt: np.ndarray, answer: Generation) -> None:
    """Check that every token of an answer has its log-prob and its entropy, given the logits of the model."""
    count = len(answer.token_ids)
    assert count == len(answer.logprobs) == len(answer.entropies) > 0
    rows = logits.log_softmax(-1)[len(prompt) - 1 : len(prompt) - 1 + count]
    chosen = rows[range(count), answer.token_ids.tolist()]
    np.testing.assert_allclose(answer.logprobs, chosen.numpy(), atol=1e-3)
    np.testing.assert_allclose(answer.entropies, -(rows.exp() * rows).sum(-1).numpy(), atol=1e-3)


def test_streamed_answers_are_right_under_retractions(
    pressed: PressedEngine, mixture: "Callable[[list[int]], tuple[Tensor, np.ndarray]]"
) -> None:
    """The first tokens come once, with the values of the whole answer, also if the request is retracted later."""
    prompts, firsts = draw_prompts(), list[list[Generation]]([] for _ in range(REQUESTS))

    async def run() -> list[Generation]:
        async with pressed.client(streams=True) as client:
            return await sample(client, prompts, [{"first": (FIRST_TOKENS, heard.append)} for heard in firsts])

    answers = asyncio.run(run())
    for prompt, answer, heard in zip(prompts, answers, firsts, strict=True):
        check_values(mixture([*prompt.tolist(), *answer.token_ids.tolist()])[0], prompt, answer)
        if len(answer.token_ids) > FIRST_TOKENS + 1:
            (first,) = heard
            for name in ("token_ids", "logprobs", "entropies"):
                assert (getattr(first, name) == getattr(answer, name)[:FIRST_TOKENS]).all()
    assert sum(map(len, firsts)) > REQUESTS // 2


def test_expert_routes_are_right_under_retractions_and_evictions(
    pressed: PressedEngine, mixture: "Callable[[list[int]], tuple[Tensor, np.ndarray]]"
) -> None:
    """Each token has the routes of the model, in its first request or in the one that continues after it."""
    prompts = draw_prompts()

    async def run() -> tuple[list[Generation], list[Generation]]:
        async with pressed.client() as client:
            first = await sample(client, prompts, [{"routes": ExpertRouteRequest(0, SHAPE)}] * REQUESTS)
            longer = joined(prompts, first)
            starts = [{"routes": ExpertRouteRequest(len(prefix) - 1, SHAPE)} for prefix in longer]
            return first, await sample(client, longer, starts)

    first, second = asyncio.run(run())
    assert sum(answer.cached_tokens for answer in second) < sum(answer.prompt_tokens for answer in second) // 2
    differing = []
    for prompt, before, answer in zip(prompts, first, second, strict=True):
        ids = np.concatenate([prompt, before.token_ids, answer.token_ids]).tolist()
        logits, experts = mixture(ids)
        check_values(logits, prompt, before)
        check_values(logits, np.concatenate([prompt, before.token_ids]), answer)
        assert before.routes is not None
        assert answer.routes is not None
        routes = np.concatenate([before.routes, answer.routes])
        assert len(routes) == len(ids) - 1
        differing.append((np.sort(routes, -1) != experts[:-1]).any((1, 2)).mean())
    assert max(differing) < 0.02, "float32 may decide a tie in another way, seldom"


@pytest.mark.slow_campaign
def test_answers_are_right_under_evictions_and_retractions(
    tiny_model: Path, tmp_path: Path, reference: "Callable[[list[int]], Tensor]"
) -> None:
    """Every token has its log-prob and its entropy, and they are those of the model."""
    prompts = draw_prompts()

    async def run() -> tuple[list[Generation], list[Generation]]:
        async with small.client() as client:
            first = await sample(client, prompts)
            return first, await sample(client, joined(prompts, first))

    with launched(tiny_model, tmp_path / "engine.log") as small:
        first, second = asyncio.run(run())
    assert sum(answer.cached_tokens for answer in second) < sum(answer.prompt_tokens for answer in second) // 2
    for prompt, before, answer in zip(prompts, first, second, strict=True):
        longer = np.concatenate([prompt, before.token_ids])
        logits = reference([*longer.tolist(), *answer.token_ids.tolist()])
        check_values(logits, prompt, before)
        check_values(logits, longer, answer)
