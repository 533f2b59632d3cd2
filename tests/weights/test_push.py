"""Pushes into a real SGLang server: its next log-probs are those of the trainer's weights, or it refuses to
generate."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests
import torch

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.engine.wire.checksums import Sample
from arpo_megatron.trainer.consistency import GAP_LIMITS
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, PROBE_TOKENS, WeightSync, probe_gap
from arpo_megatron.weights.transports import Broadcast, Disk, SharedMemory
from tests.models.tiny_models import make, megatron_logprobs, reference_logprobs
from tests.weights.pushes import (
    BUCKET_BYTES,
    NORM,
    ROOT,
    SIZES,
    TIMEOUT_S,
    TINY_BUCKET_BYTES,
    TOKENS,
    add_tokenizer,
    begun,
    generate,
    post,
    trainer,
    weight_sync,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine") / "model"
    make(directory, "qwen3-tied")
    add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineHandle]:
    with launch_engine(model, SIZES, dtype="float32", seed=1, log_path=model.parent / "log") as handle:
        yield handle


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("transport", "seed"), [("broadcast", 1), ("ipc", 3), ("disk", 5)], ids=["broadcast", "ipc", "disk"]
)
def test_each_push_gives_the_engine_the_trainers_weights_and_version(
    engine: EngineHandle, tmp_path: Path, transport: str, seed: int
) -> None:
    from arpo_megatron.weights.export import hf_buckets

    makers = {"broadcast": Broadcast, "ipc": SharedMemory, "disk": lambda r: Disk(r, tmp_path / "sync")}
    with weight_sync(engine.url, makers[transport]) as sync:
        for version, size in ((seed, BUCKET_BYTES), (seed + 1, TINY_BUCKET_BYTES)):
            model, spec, reference = trainer(tmp_path, version)
            with torch.no_grad():
                wanted = megatron_logprobs(model, TOKENS).numpy()
                expected = reference_logprobs(reference, TOKENS).numpy()
            generate(engine.url)
            cached_before = generate(engine.url)["meta_info"]["cached_tokens"]
            assert probe_gap(wanted, sync.engines.start_logprobs(TOKENS.tolist())()[0]) > 0.1

            report = sync.push(hf_buckets([model], spec, size, sync.buffers), version)

            after = generate(engine.url)["meta_info"]
            assert after["weight_version"] == str(version)
            assert cached_before > 0
            assert after["cached_tokens"] == 0  # no key or value of the old weights is served
            (scored,) = sync.engines.start_logprobs(TOKENS.tolist())()
            assert probe_gap(wanted, scored) < 1e-4
            assert probe_gap(expected, scored) < 1e-4
            assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())
            assert report.buckets > 1
            if size == BUCKET_BYTES:
                assert len(report.verified) >= report.buckets
            else:  # of what comes in blocks rows are sampled once
                assert report.buckets > len(list(model.parameters()))
                assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= set(report.verified)
    assert not (tmp_path / "sync").exists()


@pytest.mark.usefixtures("one_rank")
def test_all_tensors_are_found_in_the_engine(engine: EngineHandle, tmp_path: Path) -> None:
    """Fused ones, and the tied head's; the checksums are those of other code over the file's tensors."""
    from arpo_megatron.weights.export import hf_tensors

    model, spec, _ = trainer(tmp_path, 7)
    tensors = dict(hf_tensors([model], spec))
    with weight_sync(engine.url) as sync:
        sync.push([list(tensors.items())], 7)
    samples = {name: Sample.of(tensor, 0.0, 2**30) for name, tensor in tensors.items()}
    (held,) = EngineAdmin([engine.url], TIMEOUT_S).checksums(samples)
    for name, tensor in tensors.items():
        bits = tensor.detach().numpy().view(np.int32).ravel().astype(object)
        place = np.arange(bits.size).astype(object)
        expected = int((bits * (2 * place + 1)).sum()) % 2**64
        assert samples[name].difference(held[name], expected) is None, name  # the sum over both ranks of the engine


def transposed(projection: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    name = f"model.layers.1.self_attn.{projection}.weight"
    return lambda tensors: {name: tensors[name].T.contiguous()}


def of_swapped_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layers' tensors under each other's names."""
    others = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {name.replace(own, others[own]): tensor for own in others for name, tensor in tensors.items() if own in name}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "wrong",
    [of_swapped_layers, *(transposed(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))],
    ids=["swapped-layers", "q", "k", "v", "o"],
)
def test_short_probe_detects_swapped_tensors(
    engine: EngineHandle, tmp_path: Path, wrong: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    from arpo_megatron.weights.export import hf_tensors

    model, spec, _ = trainer(tmp_path, 2)
    tensors = {name: tensor.detach() for name, tensor in hf_tensors([model], spec)}
    gaps = []
    with weight_sync(engine.url, verify_every=0) as sync:
        for pushed in (tensors, tensors, tensors | wrong(tensors)):
            probe = TOKENS[: sync.push([list(pushed.items())], 2).probe_tokens]
            with torch.no_grad():
                wanted = megatron_logprobs(model, probe).numpy()
            gaps.append(probe_gap(wanted, sync.engines.start_logprobs(probe.tolist())()[0]))
    assert len(probe) == PROBE_TOKENS
    assert max(gaps[:2]) < GAP_LIMITS["float32"] / 10
    assert gaps[2] > GAP_LIMITS["float32"] * 3


def test_first_push_after_a_failure_and_every_nth_are_verified(engine: EngineHandle) -> None:
    thorough, plain = (LONG_PROBE_TOKENS, (NORM[0],)), (PROBE_TOKENS, ())

    def pushes(sync: WeightSync, count: int) -> list[tuple[int, tuple[str, ...]]]:
        reports = [sync.push([[NORM]], 3) for _ in range(count)]
        return [(report.probe_tokens, report.verified) for report in reports]

    with weight_sync(engine.url, verify_every=0) as sync:
        assert pushes(sync, 4) == [thorough, plain, plain, plain]
    with weight_sync(engine.url, verify_every=3) as sync:
        assert pushes(sync, 5) == [thorough, plain, plain, thorough, plain]
        with pytest.raises(WeightPushError, match="Failed to update"):
            sync.push([[("model.norm.weight", torch.ones(7))]], 4)
        assert pushes(sync, 2) == [thorough, plain]
    requests = EngineAdmin([engine.url], TIMEOUT_S)
    quantized = WeightSync(requests, Broadcast(requests), verify_every=2, comparable=False)
    assert pushes(quantized, 3) == [(LONG_PROBE_TOKENS, ()), plain, (LONG_PROBE_TOKENS, ())]
    quantized.close()


class Corrupting(Broadcast):
    """Changes the lowest bit of one element of each tensor on its way."""

    def send(self, bucket: Bucket) -> Callable[[], None]:
        wrong = [(name, tensor.detach().clone()) for name, tensor in named_tensors(bucket)]
        for _, tensor in wrong:
            tensor.view(torch.int32).view(-1)[-1] ^= 1
        return super().send(replace(bucket, tensor=wrong[0][1]) if isinstance(bucket, Block) else wrong)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("size", [BUCKET_BYTES, TINY_BUCKET_BYTES], ids=["whole", "blocks"])
def test_checksum_detects_one_wrong_bit_on_the_engine(engine: EngineHandle, tmp_path: Path, size: int) -> None:
    from arpo_megatron.weights.export import hf_buckets

    model, spec, _ = trainer(tmp_path, 8)
    with weight_sync(engine.url, Corrupting, verify_every=0) as sync:
        for _ in range(2):  # the next attempt is looked at too
            with pytest.raises(WeightPushError, match=r"is not what the trainer sent: checksum \w{16} instead of"):
                sync.push(hf_buckets([model], spec, size), 8)


def test_push_waits_for_running_generations_and_refuses_new_ones(engine: EngineHandle) -> None:
    refused: list[requests.Response] = []

    def bucket_after_a_request() -> Iterator[Bucket]:
        refused.append(post(engine.url))
        yield [NORM]

    with ThreadPoolExecutor(1) as pool, weight_sync(engine.url) as sync:
        long = begun(engine.url, pool)
        sync.push(bucket_after_a_request(), 20)
        assert long.result() == 200
    assert refused[0].status_code == 503
    assert refused[0].json() == {"error": "weights of version 20 are arriving"}
    assert generate(engine.url)["meta_info"]["weight_version"] == "20"


def test_push_fails_if_generations_outlast_the_deadline(engine: EngineHandle) -> None:
    version = generate(engine.url)["meta_info"]["weight_version"]
    schedulers = [
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    ]
    with ThreadPoolExecutor(1) as pool, weight_sync(engine.url, timeout_s=5.0) as sync:
        long = begun(engine.url, pool)
        for scheduler in schedulers:
            scheduler.suspend()  # however fast they decode
        try:
            with pytest.raises(WeightPushError, match=r"begin_push: HTTP 409: .*1 generations were still running"):
                sync.push([[NORM]], 21)
        finally:
            for scheduler in schedulers:
                scheduler.resume()
        assert long.result() == 200
    assert generate(engine.url)["meta_info"]["weight_version"] == version


@pytest.mark.usefixtures("one_rank")
def test_restarted_engine_is_joined_again(engine: EngineHandle, model: Path, tmp_path: Path) -> None:
    from arpo_megatron.weights.export import hf_buckets

    trained, spec, _ = trainer(tmp_path, 25)
    with torch.no_grad():
        wanted = megatron_logprobs(trained, TOKENS).numpy()

    def push(sync: WeightSync, version: int, *, verified: bool) -> None:
        report = sync.push(hf_buckets([trained], spec, BUCKET_BYTES), version)
        assert bool(report.verified) is verified
        assert [generate(url)["meta_info"]["weight_version"] for url in both] == [str(version)] * 2
        assert max(probe_gap(wanted, scored) for scored in sync.engines.start_logprobs(TOKENS.tolist())()) < 1e-4

    with launch_engine(model, SIZES, dtype="float32", seed=1, log_path=tmp_path / "log") as second:
        both, port = [engine.url, second.url], int(second.url.rpartition(":")[2])
        requests = EngineAdmin(both, TIMEOUT_S)
        sync = WeightSync(requests, Broadcast(requests), verify_every=0)
        push(sync, 25, verified=True)
        push(sync, 26, verified=False)
    with launch_engine(model, SIZES, dtype="float32", seed=1, log_path=tmp_path / "log", port=port) as second:
        push(sync, 27, verified=True)
        sync.close()


@pytest.mark.usefixtures("one_rank")
def test_engine_refuses_after_a_killed_push_until_a_whole_one(engine: EngineHandle, tmp_path: Path) -> None:
    from arpo_megatron.weights.export import hf_buckets

    model, spec, _ = trainer(tmp_path, 30)
    command = [sys.executable, "-m", "tests.weights.half_a_push", engine.url, str(tmp_path / "30"), "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one bucket has arrived\n"
        process.kill()
    for _ in range(2):
        assert post(engine.url).status_code == 503
    with weight_sync(engine.url) as sync:
        with pytest.raises(WeightPushError, match=r"HTTP 503: .*weights of version 30 are arriving"):
            sync.engines.start_logprobs(TOKENS.tolist())()
        sync.push(hf_buckets([model], spec, BUCKET_BYTES), 31)
        with torch.no_grad():
            assert (
                probe_gap(megatron_logprobs(model, TOKENS).numpy(), sync.engines.start_logprobs(TOKENS.tolist())()[0])
                < 1e-4
            )
    assert generate(engine.url)["meta_info"]["weight_version"] == "31"


GENERATES = {
    "/generate": {"input_ids": [3, 4]},
    "/vertex_generate": {"instances": [{"input_ids": [3, 4]}], "parameters": {}},
    "/api/generate": {"model": "m", "prompt": "w1 w2", "stream": False},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "w1 w2"}], "stream": False},
    "/v1/completions": {"model": "m", "prompt": "w1 w2", "max_tokens": 2},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2},
    "/invocations": {"model": "m", "messages": [{"role": "user", "content": "w1 w2"}]},
    "/a/path/of/the/next/version": {},
}


def check_silent(url: str, reason: str) -> None:
    """The engine generates by no path and no method, and still reports its health."""
    asked = [(method, path, body) for path, body in GENERATES.items() for method in ("POST", "PUT", "GET")]
    for method, path, body in [*asked, ("GET", "/health_generate", {})]:
        answer = requests.request(method, url + path, json=body, timeout=20)
        assert (answer.status_code, answer.json()) == (503, {"error": reason}), (method, path)
    for path in ("/health", "/health/arpo", "/model_info", "/server_info"):
        assert requests.get(url + path, timeout=20).status_code == 200, path


def test_half_a_push_is_never_served_or_committed(engine: EngineHandle, model: Path) -> None:
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    transport = Broadcast(engines)
    transport.connect(engines.begin_push(39))
    transport.send([NORM])()
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*weights of version 39 are arriving, not 38"):
        engines.commit_push(38, 1)
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*2 of the 3 parts of version 39 have arrived"):
        engines.commit_push(39, transport.finish() + 1)
    check_silent(engine.url, "weights of version 39 are arriving")
    engines.begin_push(40)  # of another trainer: it knows nothing of the parts that have come
    for loads in (0, 2):
        with pytest.raises(WeightPushError, match=rf"HTTP 409: .*0 of the {loads} parts of version 40 have arrived"):
            engines.commit_push(40, loads)
    check_silent(engine.url, "weights of version 40 are arriving")
    transport.close()
    with weight_sync(engine.url) as sync:
        sync.push([[NORM]], 41)
    assert generate(engine.url)["meta_info"]["weight_version"] == "41"
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*weights have arrived, but no push has begun"):
        engines.post_all("update_weights_from_disk", [(engine.url, {"model_path": str(model)})])[0].result()
    engines.close()


def test_engine_with_lent_memory_refuses_until_a_push(engine: EngineHandle) -> None:
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    engines.resume_memory()  # as after a restart while the trainer had the memory
    generate(engine.url)
    with ThreadPoolExecutor(1) as pool:
        long = begun(engine.url, pool)
        engines.release_memory()
        assert long.result() == 200
    engines.release_memory()
    check_silent(engine.url, "the engine's memory is lent to the trainer")
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*weights of version 44 cannot be stored"):
        engines.begin_push(44)
    engines.resume_memory()
    engines.resume_memory()
    check_silent(engine.url, "the engine's memory is back and holds no weights yet")
    engines.close()
    with weight_sync(engine.url) as sync:
        sync.push([[NORM]], 45)
    assert generate(engine.url)["meta_info"]["weight_version"] == "45"


def test_rejected_tensor_is_reported_and_the_next_push_succeeds(
    engine: EngineHandle,
) -> None:
    with weight_sync(engine.url) as sync:
        with pytest.raises(
            WeightPushError, match=r"/update_weights_from_distributed: HTTP 400: .*Failed to update"
        ) as error:
            sync.push([[("model.norm.weight", torch.ones(7))]], 50)
        assert engine.url in str(error.value)
        assert "\n" not in str(error.value)
        assert post(engine.url).status_code == 503
        sync.push([[NORM]], 51)
    assert generate(engine.url)["meta_info"]["weight_version"] == "51"


@pytest.mark.parametrize("megabytes", [0.001, 32], ids=["fits-the-socket", "stalls-the-broadcast"])
def test_hanging_engine_is_an_error_at_the_deadline(engine: EngineHandle, megabytes: float) -> None:
    def stops_then_sends() -> Iterator[Bucket]:
        os.killpg(engine.process.pid, signal.SIGSTOP)
        yield [("model.norm.weight", torch.ones(int(megabytes * 2**18)))]

    started = time.monotonic()
    with weight_sync(engine.url, timeout_s=2.0) as hopeless:
        try:
            with pytest.raises(WeightPushError, match=engine.url):
                hopeless.push(stops_then_sends(), 60)
        finally:
            os.killpg(engine.process.pid, signal.SIGCONT)
    assert 1.5 < time.monotonic() - started < 60.0


def test_dead_engine_is_an_error_and_not_a_hang(engine: EngineHandle) -> None:
    with weight_sync(engine.url) as sync:
        sync.push([[NORM]], 70)
        engine.stop()
        started = time.monotonic()
        with pytest.raises(WeightPushError, match=f"{engine.url}/arpo/begin_push"):
            sync.push([[NORM]], 71)
    assert time.monotonic() - started < TIMEOUT_S
