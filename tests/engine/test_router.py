"""SGLang's own router requires the token of the job, may open many connections, and passes all of a request on."""

import asyncio
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest
import requests

from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.growing_trees import PRIORITIES
from arpo_megatron.engine.launch import router_service
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.wire.endpoints import bearer
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import stop_groups
from arpo_megatron.utils.service_spec import ServiceSpec
from tests.engine.scripted import ScriptedEngine

Start = Callable[[ScriptedEngine], ScriptedEngine]


@pytest.mark.parametrize(
    ("router", "engines", "streams", "started"),
    [
        ("auto", 2, True, False),
        ("auto", 2, False, True),  # `arpo serve`, or engines that cannot stream entropies
        ("auto", 1, False, False),
        ("sglang", 2, True, True),
        ("none", 2, False, False),
    ],
)
def test_router_is_not_between_rollouts_and_engines_that_stream_entropies(
    tmp_path: Path, router: Literal["auto", "sglang", "none"], engines: int, streams: bool, started: bool
) -> None:
    """It would drop the interval of a stream, and hide from the rollouts which engine has room."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, engines + 1)]
    found = router_service(EngineConfig(router=router), urls, log_path=tmp_path / "log", ports=(8, 9), streams=streams)
    assert (found is not None) is started


def test_router_is_not_between_rollouts_and_engines_that_return_expert_routes(tmp_path: Path) -> None:
    """It would drop the fields that ask for them."""
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    engine = EngineConfig(router="sglang")
    assert router_service(engine, urls, log_path=tmp_path / "log", ports=(8, 9), expert_routes=True) is None


@pytest.mark.parametrize("token", [None, "secret"])
def test_router_requires_its_token_and_takes_all_descriptors(tmp_path: Path, token: str | None) -> None:
    """Without an engine it answers 503, which the client retries."""
    log = tmp_path / "router.log"
    engine = EngineConfig(router="sglang")
    program = router_service(engine, ["http://127.0.0.1:9"], log_path=log, ports=free_ports(2), token=token)
    assert program is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # many systems start processes with a low soft limit
    try:
        process = program.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        wait_until_it_listens(program)
        # Each waiting request takes two descriptors: one to the client, one to the engine.
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        assert status(program, None) == (401 if token else 503), f"see {log}"
        assert status(program, token) == 503, f"see {log}"
    finally:
        stop_groups([process], 0.0)


def status(program: ServiceSpec, token: str | None) -> int:
    """Return the HTTP status of a generation request."""
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    return requests.post(f"{program.url}/generate", json=body, headers=bearer(token), timeout=30).status_code


def wait_until_it_listens(program: ServiceSpec) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            requests.get(program.url + program.alive, timeout=30)
        except requests.ConnectionError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the router does not listen; see {program.log}")


def test_router_passes_on_the_part_of_the_cache_and_the_priority(scripted_engine: Start, tmp_path: Path) -> None:
    """Without the first, new trees would read the keys and values of old weights (`rollout.across_push=keep_kv`)."""
    engine = scripted_engine(ScriptedEngine(lambda _text: "yes\0"))
    program = router_service(
        EngineConfig(router="sglang"), [engine.url], log_path=tmp_path / "router.log", ports=free_ports(2), token=None
    )
    assert program is not None
    process = program.start()

    async def run() -> None:
        async with EngineClient(engine.url, router=program.url, keeps_kv=True, by_age=True) as client:
            client.begin_tree("old", 3)
            await client.generate([104, 105], max_new_tokens=4, sampling=Sampling(), key="old")
            await client.prefill([104, 105], key="new")

    try:
        wait_until_it_listens(program)
        asyncio.run(run())
    finally:
        stop_groups([process], 0.0)
    assert [request["extra_key"] for request in engine.requests] == ["3", "0"]
    assert [request.get("priority") for request in engine.requests] == [PRIORITIES - 1, None]
