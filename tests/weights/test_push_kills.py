"""Kills at named and at random moments of pushes: no half push is served, and the next push repairs the engine."""

import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch

from arpo_megatron.config import ParallelConfig
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import PushSettings, WeightSync, probe_gap
from tests.models.tiny_models import reference_logprobs
from tests.ranks import RankFailedError, run_ranks
from tests.weights.pushes import (
    BUCKET_BYTES,
    MOMENTS,
    SIZES,
    TIMEOUT_S,
    TINY_BUCKET_BYTES,
    TOKENS,
    at,
    generate,
    post,
    trainer,
)

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow_campaign]
BOTH = ParallelConfig(pipeline=2)
COMMITTED = "before checksums"
MODELS = (73, 74)
"""Seeds of the weights of even and of odd versions."""
LONGEST_S = 1.0
"""Several pushes fit into it."""


def push_and_die(url: str, directory: Path, version: int, kind: str, moment: str) -> None:
    """Push on both ranks of PP2; rank 0 is killed at the moment."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.weights.load import load_hf

    parallel.initialize(BOTH, seed=1)
    spec = ModelSpec.from_hf(directory)
    chunks = build_chunks(spec, BOTH, torch.float32, initialize=False)
    load_hf(chunks, spec, directory)
    control = Control(parallel.group("control"))
    settings = PushSettings(transport=kind, bucket_bytes=BUCKET_BYTES)  # type: ignore[arg-type]  # a literal
    sync = WeightSync(control, EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    if control.rank:
        sync.push(version)
        return
    with at(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        sync.push(version)


@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_killed_trainer_leaves_the_engine_closed_or_whole(engine: EngineHandle, tmp_path: Path, kind: str) -> None:
    trained = trainer(tmp_path, 70)
    for number, moment in enumerate(MOMENTS):
        version = 100 + 10 * number
        with trained.sync(engine.url, transport=kind) as sync:
            sync.push(version)
        with pytest.raises(RankFailedError) as died:
            run_ranks(push_and_die, engine.url, tmp_path / "70", version + 1, kind, moment, ranks=2)
        assert died.value.exit_code == -signal.SIGKILL, (moment, died.value)
        if moment == "before it begins":
            assert generate(engine.url)["meta_info"]["weight_version"] == str(version)
        elif moment == COMMITTED:
            assert generate(engine.url)["meta_info"]["weight_version"] == str(version + 1)
        else:
            assert post(engine.url).status_code == 503, moment
        with trained.sync(engine.url, transport=kind) as sync:
            sync.push(version + 2)
            assert trained.gap(sync) < 1e-4
        assert generate(engine.url)["meta_info"]["weight_version"] == str(version + 2)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_killed_engine_fails_the_push_and_its_successor_gets_a_whole_one(
    engine_model: Path, tmp_path: Path, kind: str, moment: str
) -> None:
    trained = trainer(tmp_path, 71)
    log = tmp_path / "log"
    with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log) as first:
        port = int(first.url.rpartition(":")[2])
        with trained.sync(first.url, transport=kind) as sync:
            with at(moment, lambda: kill_rank(first)), pytest.raises(WeightPushError):
                sync.push(200)
            first.stop()
            with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log, port=port) as second:
                assert sync.push(201).verified
                assert trained.gap(sync) < 1e-4
                assert generate(second.url)["meta_info"]["weight_version"] == "201"


def kill_rank(server: EngineHandle) -> None:
    """Kill the second rank of an engine and wait for the end of the server, which follows."""
    ranks = psutil.Process(server.process.pid).children(recursive=True)
    (rank,) = [child for child in ranks if "scheduler_TP1" in " ".join(child.cmdline())]
    rank.kill()
    psutil.wait_procs([psutil.Process(server.process.pid)], timeout=30)


def push_until_killed(url: str, directory: Path, kind: str, colocated: bool, dies: int, after_s: float) -> None:
    """Push two models in turn on both ranks of PP2, until the rank `dies` is killed."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.weights.load import load_hf

    parallel.initialize(BOTH, seed=1)
    spec = ModelSpec.from_hf(directory / str(MODELS[0]))
    chunks = build_chunks(spec, BOTH, torch.float32, initialize=False)
    control = Control(parallel.group("control"))
    settings = PushSettings(kind, TINY_BUCKET_BYTES, verify_every=2, colocated=colocated)  # type: ignore[arg-type]  # a literal
    sync = WeightSync(control, EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    version = 300
    while True:
        load_hf(chunks, spec, directory / str(MODELS[version % 2]))
        if colocated:
            control.on_rank_zero(sync.engines.release_memory)
        sync.push(version)
        version += 1
        if version == 302 and control.rank == dies:  # both models have arrived
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "colocated"), [("network", False), ("ipc", False), ("ipc", True)])
def test_trainer_killed_at_a_random_moment_leaves_the_engine_closed_or_whole(
    engine: EngineHandle, tmp_path: Path, kind: str, colocated: bool, seed: int
) -> None:
    draw = random.Random(f"{kind} {colocated} {seed}")
    trained = [trainer(tmp_path, model) for model in MODELS]
    with pytest.raises(RankFailedError) as died:
        run_ranks(
            *(push_until_killed, engine.url, tmp_path, kind, colocated, seed % 2, draw.uniform(0, LONGEST_S)), ranks=2
        )
    assert died.value.exit_code == -signal.SIGKILL, died.value
    answer = post(engine.url)
    assert answer.status_code in (200, 503)
    if answer.status_code == 200:
        version = int(answer.json()["meta_info"]["weight_version"])
        with torch.no_grad():
            expected = reference_logprobs(trained[version % 2].reference, TOKENS).numpy()
        (scored,) = EngineAdmin([engine.url], TIMEOUT_S).start_logprobs(TOKENS.tolist())()
        assert probe_gap(expected, scored) < 1e-4, "weights and version belong together"
    with trained[0].sync(engine.url, transport=kind, colocated=colocated) as sync:
        sync.push(999)
        assert trained[0].gap(sync) < 1e-4


VICTIMS = ("scheduler_TP0", "scheduler_TP1", "detokenizer", "")
"""Processes of an engine by a word in their command line; "": the server itself."""


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_engine_killed_at_a_random_moment_fails_a_push_and_its_successor_gets_a_whole_one(
    engine_model: Path, tmp_path: Path, kind: str, victim: str
) -> None:
    draw = random.Random(f"{kind} {victim}")
    trained = trainer(tmp_path, 75)
    log = tmp_path / "log"
    with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log) as first:
        port = int(first.url.rpartition(":")[2])
        with trained.sync(first.url, transport=kind, bucket_bytes=TINY_BUCKET_BYTES, verify_every=2) as sync:
            server = psutil.Process(first.process.pid)
            (process,) = [
                each
                for each in (server.children(recursive=True) if victim else [server])
                if victim in " ".join(each.cmdline())
            ]
            sync.push(400)
            killer = threading.Timer(draw.uniform(0, LONGEST_S), process.kill)
            killer.start()
            with pytest.raises(WeightPushError):
                for version in range(401, 4000):
                    sync.push(version)
            killer.join()
            first.stop()
            with launch_engine(engine_model, SIZES, dtype="float32", seed=1, log_path=log, port=port) as second:
                assert sync.push(4001).verified
                assert trained.gap(sync) < 1e-4
                assert generate(second.url)["meta_info"]["weight_version"] == "4001"
