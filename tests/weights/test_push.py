"""A push into a real SGLang server: the engine's next log-probs are those of the trainer's weights."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY, make, megatron_logprobs, reference_logprobs, sample_tokens

from arpo_megatron.config import EngineConfig, ParallelConfig
from arpo_megatron.rollout.server import EngineHandle, launch_engine
from arpo_megatron.weights.push import WeightPusher, WeightPushError, buckets, probe_gap
from arpo_megatron.weights.shape import ModelShape

TOKENS = sample_tokens(48)


def add_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(directory)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    directory = tmp_path_factory.mktemp("engine")
    make(directory / "model", "qwen3-tied")
    add_tokenizer(directory / "model")
    sizes = EngineConfig(max_running_requests=4, max_total_tokens=2048, memory_fraction=0.1)
    with launch_engine(directory / "model", sizes, dtype="float32", seed=1, log_path=directory / "log") as handle:
        yield handle


@pytest.fixture(scope="module")
def pusher(engine: EngineHandle) -> Iterator[WeightPusher]:
    made = WeightPusher(engine.url, bucket_bytes=20_000, timeout_s=20.0)
    yield made
    made.close()


def generate(url: str) -> dict[str, Any]:
    body = {"input_ids": TOKENS.tolist(), "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}
    answer = requests.post(f"{url}/generate", json=body, timeout=30)
    answer.raise_for_status()
    return dict(answer.json())


@pytest.mark.usefixtures("one_rank")
def test_each_push_gives_the_engine_the_trainers_weights_and_version(
    engine: EngineHandle, pusher: WeightPusher, tmp_path: Path
) -> None:
    from arpo_megatron.actor.model import build_model
    from arpo_megatron.weights.export import hf_tensors
    from arpo_megatron.weights.load import load_hf

    for version in (1, 2):
        reference = make(tmp_path / str(version), "qwen3-tied", seed=version)
        shape = ModelShape.from_hf(tmp_path / str(version))
        model = build_model(shape, ParallelConfig(), "float32")
        load_hf([model], shape, tmp_path / str(version))
        with torch.no_grad():
            trainer = megatron_logprobs(model, TOKENS).numpy()
            expected = reference_logprobs(reference, TOKENS).numpy()
        generate(engine.url)
        cached_before = generate(engine.url)["meta_info"]["cached_tokens"]
        assert probe_gap(trainer, pusher.score(TOKENS.tolist())[0]) > 0.1

        report = pusher.push(hf_tensors([model], shape), version)

        after = generate(engine.url)["meta_info"]
        assert after["weight_version"] == str(version)
        assert cached_before > 0
        assert after["cached_tokens"] == 0  # no key or value of the old weights is served
        (scored,) = pusher.score(TOKENS.tolist())
        assert probe_gap(trainer, scored) < 1e-4
        assert probe_gap(expected, scored) < 1e-4
        assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert report.buckets > 1


def test_a_tensor_the_engine_cannot_take_is_an_error_with_its_words(engine: EngineHandle) -> None:
    second = WeightPusher(engine.url, timeout_s=20.0)
    with pytest.raises(
        WeightPushError, match=r"/update_weights_from_distributed: HTTP 400: .*Failed to update"
    ) as error:
        second.push([("model.norm.weight", torch.ones(7))], 3)
    assert engine.url in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(WeightPushError, match="make a new one"):
        second.push([("model.norm.weight", torch.ones(32))], 3)
    second.close()


@pytest.mark.parametrize("megabytes", [0.001, 32], ids=["fits-the-socket", "stalls-the-broadcast"])
def test_an_engine_that_hangs_is_an_error_at_the_deadline(engine: EngineHandle, megabytes: float) -> None:
    hopeless = WeightPusher(engine.url, timeout_s=2.0)
    os.killpg(engine.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(WeightPushError, match=engine.url):
            hopeless.push([("model.norm.weight", torch.ones(int(megabytes * 2**18)))], 4)
    finally:
        os.killpg(engine.process.pid, signal.SIGCONT)
    assert 1.5 < time.monotonic() - started < 10.0


def test_an_engine_that_is_gone_is_an_error_and_not_a_hang(engine: EngineHandle, pusher: WeightPusher) -> None:
    engine.stop()
    started = time.monotonic()
    with pytest.raises(WeightPushError, match=engine.url):
        pusher.push([("model.norm.weight", torch.ones(32))], 4)
    with pytest.raises(WeightPushError, match="/server_info: no engine answers"):
        WeightPusher(engine.url, timeout_s=20.0)
    assert time.monotonic() - started < 20.0


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_buckets_keep_every_tensor_in_order_and_within_the_bound(sizes: list[int], limit: int) -> None:
    tensors = [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    cut = list(buckets(iter(tensors), limit))
    assert [name for bucket in cut for name, _ in bucket] == [name for name, _ in tensors]
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= limit for bucket in cut)
    assert all(sum(t.nbytes for _, t in [*left, right[0]]) > limit for left, right in pairwise(cut))


def test_the_probe_gap_is_the_largest_difference_and_never_hides_a_nan() -> None:
    assert probe_gap([-1.0, -2.0], np.float32([-1.0, -2.5])) == 0.5
    assert probe_gap([-1.0], [np.nan]) == float("inf")
    assert probe_gap([-np.inf], [-np.inf]) == float("inf")
    with pytest.raises(ValueError, match="cannot be compared"):
        probe_gap([-1.0], [-1.0, -2.0])
    assert probe_gap([], []) == 0.0
