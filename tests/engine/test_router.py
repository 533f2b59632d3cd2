"""SGLang's own router requires the token of the job and may open as many connections as the system allows."""

import resource
import time
from pathlib import Path

import psutil
import pytest
import requests

from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import router_service
from arpo_megatron.engine.wire.endpoints import bearer
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import stop_groups
from arpo_megatron.utils.service_spec import ServiceSpec


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
