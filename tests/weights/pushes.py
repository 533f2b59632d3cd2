"""A trainer and requests to its engine, for tests of weight pushes."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import requests
import torch

from arpo_megatron.config import EngineConfig, ParallelConfig
from arpo_megatron.engine.admin import EngineAdmin
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import PushSettings, WeightSync, probe_gap
from arpo_megatron.weights.transports import Ipc, Network
from tests.models.tiny_models import VOCABULARY, make, megatron_logprobs, sample_tokens

TOKENS = sample_tokens(48)
TIMEOUT_S = 60.0
BUCKET_BYTES = 20_000
TINY_BUCKET_BYTES = 3_000
"""All projections, and the embedding, come in blocks."""
LAYERS = 4
"""Enough for two stages of two chunks each."""
SIZES = EngineConfig(tensor=2, max_running_requests=4, max_total_tokens=2048, memory_fraction=0.1)


def add_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A Megatron model with random weights, its shape, and the transformers model it was loaded from."""

    model: Any
    spec: ModelSpec
    reference: Any

    @contextmanager
    def sync(self, *urls: str, timeout_s: float = TIMEOUT_S, **settings: Any) -> Iterator[WeightSync]:
        """One rank's end of pushes to these engines; every push is verified unless `settings` say otherwise."""
        asked = PushSettings(**{"transport": "network", "bucket_bytes": BUCKET_BYTES, "verify_every": 1, **settings})
        sync = WeightSync(Control(None), EngineAdmin(urls, timeout_s), [self.model], self.spec, asked)
        try:
            yield sync
        finally:
            sync.close()

    def gap(self, sync: WeightSync, tokens: Any = TOKENS) -> float:
        """Return the largest difference between the log-probs of trainer and engines."""
        with torch.no_grad():
            wanted = megatron_logprobs(self.model, tokens).numpy()
        return max(probe_gap(wanted, scored) for scored in sync.engines.start_logprobs(tokens.tolist())())


MOMENTS: dict[str, tuple[str, int, tuple[Any, ...]]] = {
    "before it begins": ("begin_push", 1, (EngineAdmin,)),
    "before the plan": ("engine_shards", 1, (EngineAdmin,)),
    "before both sides connect": ("connect", 1, (Network, Ipc)),
    "before the first round": ("_start", 1, (Network, Ipc)),
    "between rounds": ("_start", 3, (Network, Ipc)),
    "before the commit": ("commit_push", 1, (EngineAdmin,)),
    "before checksums": ("start_checksums", 1, (EngineAdmin,)),
}
"""Moments of a push on rank 0: the method that begins there, which of its calls, and its classes."""


@contextmanager
def at(moment: str, act: Callable[[], object]) -> Iterator[None]:
    """Do `act` once at a moment of a push of this process."""
    name, wanted, classes = MOMENTS[moment]
    calls = 0

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == wanted:
                act()
            return original(*arguments, **named)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for owner in classes:
            patch.setattr(owner, name, hooked(getattr(owner, name)))
        yield
    assert calls >= wanted, f"no push came to the moment {moment!r}"


def post(url: str, max_new_tokens: int = 4) -> requests.Response:
    sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return requests.post(
        f"{url}/generate", json={"input_ids": TOKENS.tolist(), "sampling_params": sampling}, timeout=60
    )


def begun(url: str, pool: ThreadPoolExecutor) -> "Future[int]":
    """A long generation of which the first token is there; its result is how many there are in the end."""
    sampling = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": TOKENS.tolist(), "sampling_params": sampling, "stream": True}
    answer = requests.post(f"{url}/generate", json=body, timeout=60, stream=True)
    answer.raise_for_status()
    parts = (line.removeprefix(b"data: ") for line in answer.iter_lines() if line.startswith(b"data: {"))
    first = next(parts)

    def tokens() -> int:
        *_, last = first, *parts
        return int(json.loads(last)["meta_info"]["completion_tokens"])

    return pool.submit(tokens)


def generate(url: str, max_new_tokens: int = 4) -> dict[str, Any]:
    answer = post(url, max_new_tokens)
    answer.raise_for_status()
    return dict(answer.json())


def trainer(directory: Path, seed: int, dtype: Literal["float32", "bfloat16"] = "float32") -> Trainer:
    """A trainer of one rank with random weights."""
    from arpo_megatron.actor.model import build_model
    from arpo_megatron.weights.load import load_hf

    reference = make(directory / str(seed), "qwen3-tied", seed=seed, num_hidden_layers=LAYERS)
    spec = ModelSpec.from_hf(directory / str(seed))
    model = build_model(spec, ParallelConfig(), dtype)
    load_hf([model], spec, directory / str(seed))
    return Trainer(model, spec, reference)
