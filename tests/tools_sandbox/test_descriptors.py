"""A service that is short of descriptors makes callers wait; it answers nobody wrongly."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from tools_sandbox.answers import ToolAnswer
from tools_sandbox.client import AsyncSandboxClient, SandboxClient
from tools_sandbox.config import ConfigError, SandboxConfig
from tools_sandbox.service.descriptors import share_out

StartService = Callable[..., Any]
CALLS = 250


def test_more_callers_than_descriptors_are_all_answered_right(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 8}, open_files=256)

    async def run() -> list[ToolAnswer]:
        async with AsyncSandboxClient(service.url) as client:
            codes = [{"code": f"import time; time.sleep(0.02); {n}"} for n in range(CALLS)]
            asked = (client.call("python", code, trajectory_id=f"t{n % 50}") for n, code in enumerate(codes))
            return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert [(each.status, each.text) for each in answers] == [("ok", str(n)) for n in range(CALLS)]
    assert psutil.Process(service.process.pid).num_fds() < 256
    assert "max_waiting" in service.stderr()  # that fewer may wait than configured is said
    assert len(service.stderr().splitlines()) < 40


def test_connections_that_say_nothing_keep_nobody_out(start_service: StartService) -> None:
    service = start_service({"max_concurrency": 8}, open_files=256)
    address = ("127.0.0.1", int(service.url.rsplit(":", 1)[1]))
    silent = [socket.create_connection(address) for _ in range(300)]
    try:
        with SandboxClient(service.url) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"
    finally:
        for each in silent:
            each.close()


def test_more_connections_than_select_can_watch_cost_no_call(start_service: StartService) -> None:
    service = start_service()
    address = ("127.0.0.1", int(service.url.rsplit(":", 1)[1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent = [socket.create_connection(address) for _ in range(1100)]
    try:
        with SandboxClient(service.url) as client:
            assert [client.call("python", {"code": f"{n}"}).text for n in range(8)] == [str(n) for n in range(8)]
        assert psutil.Process(service.process.pid).num_fds() > 1024
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_for_which_no_descriptor_is_left_is_told_to_come_back(start_service: StartService) -> None:
    service = start_service({"python": {"ahead": 0}})
    body = {"tool": "python", "arguments": {"code": "6 * 7"}}
    with requests.Session() as session:  # one connection, which stays
        assert session.post(f"{service.url}/call", json=body, timeout=20).json()["text"] == "42"
        soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (1, hard))
        refused = session.post(f"{service.url}/call", json=body, timeout=20)
        assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (429, True)
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert session.post(f"{service.url}/call", json=body, timeout=20).json()["text"] == "42"
    assert "failed" not in service.stderr()


def test_too_few_descriptors_to_begin_with_are_one_line() -> None:
    start = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); "
        "os.execv(sys.executable, [sys.executable, '-m', 'tools_sandbox'])"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "ulimit -Hn" in done.stderr


def test_a_low_soft_limit_is_raised(start_service: StartService) -> None:
    service = start_service(soft_open_files=64)
    soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 16)


@given(st.integers(1, 1 << 16), st.integers(1, 256), st.integers(1, 64), st.integers(1, 1 << 14), st.integers(1, 40))
def test_connections_and_calls_stay_within_the_limit(
    limit: int, places: int, workers: int, wanted: int, tools: int
) -> None:
    config = SandboxConfig(max_concurrency=places, workers=workers, max_waiting=wanted)
    try:
        budget = share_out(limit, config)
    except ConfigError as error:
        assert str(limit) in str(error)
        return
    waiting = budget.waiting(tools, places, wanted)
    assert 1 <= waiting <= wanted
    assert budget.calls < budget.connections < limit - 4 * places - 4 * workers
    if waiting > 1:
        assert tools * (places + waiting) <= budget.calls
