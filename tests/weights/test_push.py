"""Pushes into a real SGLang server of two ranks: its next log-probs are those of the trainer's weights, or it refuses
to generate."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import torch

from arpo_megatron.config import ParallelConfig
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.wire.boxes import BoxPart, TensorType
from arpo_megatron.engine.wire.checksums import difference
from arpo_megatron.engine.wire.endpoints import KV_CACHE, WEIGHTS
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, PROBE_TOKENS, PushSettings, WeightSync
from tests.models.tiny_models import reference_logprobs
from tests.ranks import RankFailedError, run_ranks
from tests.weights.pushes import (
    BUCKET_BYTES,
    SIZES,
    TIMEOUT_S,
    TINY_BUCKET_BYTES,
    TOKENS,
    begun,
    generate,
    post,
    trainer,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(("kind", "seed"), [("network", 1), ("ipc", 3), ("disk", 5)])
def test_each_push_gives_the_engine_the_trainers_weights_and_version(
    engine: EngineHandle, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, seed: int
) -> None:
    for version, bucket in ((seed, BUCKET_BYTES), (seed + 1, TINY_BUCKET_BYTES)):
        trained = trainer(tmp_path, version)
        with trained.sync(engine.url, transport=kind, bucket_bytes=bucket, directory=tmp_path / "sync") as sync:
            generate(engine.url)
            cached_before = generate(engine.url)["meta_info"]["cached_tokens"]
            assert trained.gap(sync) > 0.1

            report = sync.push(version)
            assert f"weights travel by {'gloo' if kind == 'network' else kind}: " in capsys.readouterr().out

            after = generate(engine.url)["meta_info"]
            assert after["weight_version"] == str(version)
            assert cached_before > 0
            assert after["cached_tokens"] == 0  # no key or value of the old weights is served
            assert trained.gap(sync) < 1e-4
            with torch.no_grad():
                expected = reference_logprobs(trained.reference, TOKENS).numpy()
            (scored,) = sync.engines.start_logprobs(TOKENS.tolist())()
            assert np.abs(expected - scored).max() < 1e-4
            assert report.bytes == sum(parameter.nbytes for parameter in trained.model.parameters())
            if kind != "disk":
                assert sync.transport is not None
                assert sync.transport.largest_buffer <= bucket
                for rank in sync.engines.received():
                    assert rank["received"] == rank["held"], "its own shard and nothing else"
                    assert rank["largest_buffer"] <= bucket
    assert not (tmp_path / "sync").exists()


def test_all_tensors_are_found_in_the_engine(engine: EngineHandle, tmp_path: Path) -> None:
    """Fused ones, and the tied head's; the checksums are those of other code over the file's tensors."""
    from arpo_megatron.weights.export import hf_tensors

    trained = trainer(tmp_path, 7)
    with trained.sync(engine.url) as sync:
        assert set(sync.push(7).verified) == set(dict(hf_tensors([trained.model], trained.spec)))
    tensors = dict(hf_tensors([trained.model], trained.spec))
    types = {name: TensorType(tuple(tensor.shape), "float32") for name, tensor in tensors.items()}
    (held,) = EngineAdmin([engine.url], TIMEOUT_S).start_checksums(types)()
    for name, tensor in tensors.items():
        bits = tensor.detach().numpy().view(np.int32).ravel().astype(object)
        place = np.arange(bits.size).astype(object)
        expected = int((bits * (2 * place + 1)).sum()) % 2**64
        assert difference(held[name], expected, bits.size) is None, name  # the sum over both ranks of the engine


def test_first_push_after_a_failure_and_every_nth_are_verified(engine: EngineHandle, tmp_path: Path) -> None:
    trained = trainer(tmp_path, 9)
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    for settings, probes in (
        ({"verify_every": 0}, [LONG_PROBE_TOKENS, PROBE_TOKENS, PROBE_TOKENS]),
        ({"verify_every": 2}, [LONG_PROBE_TOKENS, PROBE_TOKENS, LONG_PROBE_TOKENS, PROBE_TOKENS]),
    ):
        with trained.sync(engine.url, **settings) as sync:
            reports = [sync.push(9) for _ in probes]
            assert [report.probe_tokens for report in reports] == probes
            assert [bool(report.verified) for report in reports] == [each == LONG_PROBE_TOKENS for each in probes]
            engines.release_memory()  # not taken back by a trainer that does not share the GPU
            with pytest.raises(WeightPushError, match="cannot be stored"):
                sync.push(10)
            engines.resume_memory(WEIGHTS, *KV_CACHE)
            assert sync.push(11).verified


def test_push_to_a_restarted_engine_has_a_new_plan_and_is_verified(engine: EngineHandle, tmp_path: Path) -> None:
    with trainer(tmp_path, 12).sync(engine.url, verify_every=0) as sync:
        sync.push(12)
        assert not sync.push(13).verified
        begin, planned = sync.engines.begin_push, sync.exchange
        sync.engines.begin_push = lambda version: tuple(  # type: ignore[method-assign]
            replace(each, incarnation="another") for each in begin(version)
        )
        assert sync.push(14).verified
        assert sync.exchange is not planned


def test_push_waits_for_running_generations_and_refuses_new_ones(engine: EngineHandle, tmp_path: Path) -> None:
    refused, idle = list[requests.Response](), list[int]()
    with ThreadPoolExecutor(1) as pool, trainer(tmp_path, 20).sync(engine.url) as sync:
        long = begun(engine.url, pool)
        begin = sync.engines.begin_push

        def begin_then_ask(version: int) -> object:
            found = begin(version)
            idle.append(requests.post(f"{engine.url}/flush_cache", timeout=20).status_code)  # 400 while one runs
            refused.append(post(engine.url))
            return found

        sync.engines.begin_push = begin_then_ask  # type: ignore[method-assign, assignment]
        sync.push(20)
        assert long.result() == 200
    assert idle == [200], "begin_push returns after the last generation"
    assert refused[0].status_code == 503
    assert refused[0].json() == {"error": "weights of version 20 are arriving"}
    assert generate(engine.url)["meta_info"]["weight_version"] == "20"


def test_push_fails_if_generations_outlast_the_deadline(engine: EngineHandle, tmp_path: Path) -> None:
    version = generate(engine.url)["meta_info"]["weight_version"]
    schedulers = [
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    ]
    with ThreadPoolExecutor(1) as pool, trainer(tmp_path, 21).sync(engine.url, timeout_s=5.0) as sync:
        long = begun(engine.url, pool)
        for scheduler in schedulers:
            scheduler.suspend()  # however fast they decode
        try:
            with pytest.raises(WeightPushError, match=r"begin_push: HTTP 409: .*1 generations were still running"):
                sync.push(21)
        finally:
            for scheduler in schedulers:
                scheduler.resume()
        assert long.result() == 200
    assert generate(engine.url)["meta_info"]["weight_version"] == version


def spied(patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Note the calls of functions of torch.distributed, except those of the control group."""
    used: list[str] = []

    def spy(name: str, original: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if named.get("group") is not parallel.group("control"):
                used.append(name)
            return original(*arguments, **named)

        return called

    from arpo_megatron.actor import parallel

    for name in names:
        patch.setattr(torch.distributed, name, spy(name, getattr(torch.distributed, name)))
    return used


FOUR = ParallelConfig(tensor=2, pipeline=2, sequence=True)
INTERLEAVED = ParallelConfig(pipeline=2, virtual_pipeline=2)


def push_sharded(
    url: str, directory: Path, version: int, kind: str, dies: int | None, layout: ParallelConfig = FOUR
) -> None:
    """Push on each rank of a layout; the rank `dies` is killed in the middle, without a word."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.weights.load import load_hf

    parallel.initialize(layout, seed=1)
    spec = ModelSpec.from_hf(directory)
    chunks = build_chunks(spec, layout, torch.float32, initialize=False)
    assert len(chunks) == layout.virtual_pipeline
    load_hf(chunks, spec, directory)
    control = Control(parallel.group("control"))
    sent: list[BoxPart] = []
    view = LocalShard.view

    def view_until(self: LocalShard, piece: BoxPart) -> torch.Tensor:
        sent.append(piece)
        if control.rank == dies and len(sent) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return view(self, piece)

    LocalShard.view = view_until  # type: ignore[method-assign]
    settings = PushSettings(transport=kind, bucket_bytes=BUCKET_BYTES)  # type: ignore[arg-type]  # a literal
    sync = WeightSync(control, EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    with pytest.MonkeyPatch.context() as patch:
        used = spied(patch, "all_reduce", "batch_isend_irecv")
        report = sync.push(version)
    assert used[0] == "all_reduce", "NCCL needs every rank in a group's first operation"
    assert len(report.verified) == len(hf_shapes(spec))
    assert sync.transport is not None
    assert sync.transport.largest_buffer <= BUCKET_BYTES
    if control.rank == 0:
        assert all(rank["received"] == rank["held"] for rank in sync.engines.received())
    parallel.group("control").barrier()
    sync.close()
    parallel.destroy()


@pytest.mark.parametrize("kind", ["network", pytest.param("ipc", marks=pytest.mark.slow_campaign)])
def test_four_trainer_ranks_push_into_two_engine_ranks(engine: EngineHandle, tmp_path: Path, kind: str) -> None:
    """A trainer rank that is killed within a push leaves a closed engine, which a whole push opens."""
    trained = trainer(tmp_path, 33)
    for dies in (1, 2):
        with pytest.raises(RankFailedError) as died:
            run_ranks(push_sharded, engine.url, tmp_path / "33", 32, kind, dies, ranks=4)
        assert died.value.exit_code == -signal.SIGKILL
        assert post(engine.url).status_code == 503
    run_ranks(push_sharded, engine.url, tmp_path / "33", 33, kind, None, ranks=4)
    assert generate(engine.url)["meta_info"]["weight_version"] == "33"
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    with torch.no_grad():
        expected = reference_logprobs(trained.reference, TOKENS).numpy()
    assert np.abs(expected - engines.start_logprobs(TOKENS.tolist())()[0]).max() < 1e-4


def test_interleaved_pipeline_pushes_each_layer_to_its_place(engine: EngineHandle, tmp_path: Path) -> None:
    """Rank 0 has layers 0 and 2 of four, rank 1 layers 1 and 3. Every tensor is compared."""
    trained = trainer(tmp_path, 34)
    run_ranks(push_sharded, engine.url, tmp_path / "34", 34, "ipc", None, INTERLEAVED, ranks=2)
    scored = EngineAdmin([engine.url], TIMEOUT_S).start_logprobs(TOKENS.tolist())()[0]
    with torch.no_grad():
        expected = reference_logprobs(trained.reference, TOKENS).numpy()
    assert np.abs(expected - scored).max() < 1e-4


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


def test_engine_with_lent_memory_refuses_until_a_push(engine: EngineHandle, tmp_path: Path) -> None:
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    engines.resume_memory(WEIGHTS)  # as after a restart while the trainer had the memory
    generate(engine.url)
    with ThreadPoolExecutor(1) as pool:
        long = begun(engine.url, pool)
        engines.release_memory()
        assert long.result() == 200
    engines.release_memory()
    check_silent(engine.url, "the engine's memory is lent to the trainer")
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*weights of version 44 cannot be stored"):
        engines.begin_push(44)
    for _ in range(2):
        engines.resume_memory(WEIGHTS)
    check_silent(engine.url, "the engine's memory is back and holds no weights yet")
    engines.release_memory()  # the part that is back
    with trainer(tmp_path, 45).sync(engine.url, colocated=True) as sync:
        sync.engines.resume_memory = lambda *tags: WEIGHTS in tags and engines.resume_memory(WEIGHTS)  # type: ignore[method-assign]
        with pytest.raises(WeightPushError, match="version 45 cannot be served: the trainer has the memory of the KV"):
            sync.push(45)
        del sync.engines.resume_memory
        sync.push(46)
    assert generate(engine.url)["meta_info"]["weight_version"] == "46"


@pytest.mark.parametrize(
    ("kind", "joined"), [("network", False), ("network", True), ("ipc", True)], ids=["joining", "network", "ipc"]
)
def test_hanging_engine_is_an_error_at_the_deadline(
    engine: EngineHandle, tmp_path: Path, kind: str, joined: bool
) -> None:
    """One rank of the engine stops when the group is formed, or before the tensors come."""
    (scheduler,) = [
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if "scheduler_TP1" in " ".join(child.cmdline())
    ]
    trained = trainer(tmp_path, 60)
    with trained.sync(engine.url, transport=kind, timeout_s=8.0) as hopeless:
        before = "begin_push" if joined else "send_to_ranks"
        if joined:
            hopeless.push(60)
        original = getattr(hopeless.engines, before)

        def then_stop(*arguments: object) -> object:
            found = original(*arguments)
            scheduler.suspend()
            return found

        setattr(hopeless.engines, before, then_stop)
        started = time.monotonic()
        try:
            with pytest.raises(WeightPushError):
                hopeless.push(61)
        finally:
            scheduler.resume()
    assert 7 < time.monotonic() - started < 60
    with trained.sync(engine.url, transport=kind) as sync:
        sync.push(62)
        assert trained.gap(sync) < 1e-4


@pytest.mark.slow_campaign
def test_dead_engine_is_an_error_and_joined_again_after_its_restart(
    engine: EngineHandle, engine_model: Path, tmp_path: Path
) -> None:
    trained = trainer(tmp_path, 25)
    log = tmp_path / "log"
    with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log) as second:
        both, port = [engine.url, second.url], int(second.url.rpartition(":")[2])
        with trained.sync(*both, transport="auto", verify_every=0) as sync:
            assert sync.push(25).verified
            assert not sync.push(26).verified
            second.stop()
            with pytest.raises(WeightPushError, match=f"{second.url}/arpo/begin_push"):
                sync.push(27)
            with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log, port=port):
                assert sync.push(28).verified
                assert [generate(url)["meta_info"]["weight_version"] for url in both] == ["28", "28"]
                assert trained.gap(sync) < 1e-4
