"""Open files: a service that runs short of descriptors makes callers wait and still answers them correctly."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.services import running
from tools_sandbox.answers import ToolAnswer
from tools_sandbox.client import AsyncSandboxClient, SandboxClient
from tools_sandbox.config import ConfigError, ToolServiceConfig
from tools_sandbox.service.descriptors import plan_budget

CALLS = 160


@pytest.fixture(scope="module")
def scarce() -> Iterator[Any]:
    """A service that may open 256 files."""
    with running({"max_concurrency": 8, "workers": 1}, open_files=256) as service:
        yield service


@pytest.fixture(scope="module")
def raised() -> Iterator[Any]:
    """A service that starts with a low soft limit and creates no processes ahead."""
    with running({"python": {"ahead": 0}}, soft_open_files=64) as service:
        yield service


def test_more_callers_than_descriptors_get_right_answers(scarce: Any) -> None:
    async def run() -> list[ToolAnswer]:
        async with AsyncSandboxClient(scarce.url) as client:
            await client.call("python", {"code": "0"})  # Retry-After is estimated from earlier calls
            codes = [{"code": f"{n}"} for n in range(CALLS)]
            asked = (client.call("python", code, trajectory_id=f"t{n % 50}") for n, code in enumerate(codes))
            return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert [(each.status, each.text) for each in answers] == [("ok", str(n)) for n in range(CALLS)]
    assert psutil.Process(scarce.process.pid).num_fds() < 256
    assert "max_waiting" in scarce.stderr()  # the log reports that fewer may wait than configured
    assert len(scarce.stderr().splitlines()) < 40


def test_silent_connections_block_no_caller(scarce: Any) -> None:
    address = ("127.0.0.1", int(scarce.url.rsplit(":", 1)[1]))
    silent = [socket.create_connection(address) for _ in range(300)]
    try:
        with SandboxClient(scarce.url) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"
    finally:
        for each in silent:
            each.close()


def test_more_than_1024_connections_break_no_call(raised: Any) -> None:
    address = ("127.0.0.1", int(raised.url.rsplit(":", 1)[1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent = [socket.create_connection(address) for _ in range(1100)]
    try:
        with SandboxClient(raised.url) as client:
            assert [client.call("python", {"code": f"{n}"}).text for n in range(8)] == [str(n) for n in range(8)]
        assert psutil.Process(raised.process.pid).num_fds() > 1024
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_call_without_free_descriptor_gets_retry_after(raised: Any) -> None:
    body = {"tool": "python", "arguments": {"code": "6 * 7"}}
    with requests.Session() as session:  # one connection that stays open
        assert session.post(f"{raised.url}/call", json=body, timeout=20).json()["text"] == "42"
        soft, hard = resource.prlimit(raised.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(raised.process.pid, resource.RLIMIT_NOFILE, (1, hard))
        refused = session.post(f"{raised.url}/call", json=body, timeout=20)
        assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (429, True)
        resource.prlimit(raised.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert session.post(f"{raised.url}/call", json=body, timeout=20).json()["text"] == "42"
    assert "failed" not in raised.stderr()


def test_too_low_descriptor_limit_is_reported_in_one_line() -> None:
    start = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); "
        "os.execv(sys.executable, [sys.executable, '-m', 'tools_sandbox'])"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "ulimit -Hn" in done.stderr


def test_low_soft_limit_is_raised(raised: Any) -> None:
    soft, hard = resource.prlimit(raised.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 16)


@settings(max_examples=40)
@given(st.integers(1, 1 << 16), st.integers(1, 256), st.integers(1, 64), st.integers(1, 1 << 14), st.integers(1, 40))
def test_budget_stays_within_limit(limit: int, slots: int, workers: int, wanted: int, tools: int) -> None:
    config = ToolServiceConfig(max_concurrency=slots, workers=workers, max_waiting=wanted)
    try:
        budget = plan_budget(limit, config)
    except ConfigError as error:
        assert str(limit) in str(error)
        return
    waiting = budget.max_waiting(tools, slots, wanted)
    assert 1 <= waiting <= wanted
    assert budget.calls < budget.connections < limit - 4 * slots - 4 * workers
    if waiting > 1:
        assert tools * (slots + waiting) <= budget.calls
