"""Browse reaches public addresses only, whichever URL, redirect or answer of a name server it gets."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from ipaddress import ip_address
from typing import Any

import pytest

from tests.tools_sandbox.helpers.browsing import ALLOW, Browse
from tests.tools_sandbox.helpers.hostile_site import FORBIDDEN, PERMITTED, SECRET, Site
from tools_sandbox.answers import ToolResult
from tools_sandbox.browse.addresses import AddressPolicy, _is_own
from tools_sandbox.browse.parser import PageParser
from tools_sandbox.browse.tool import BrowseArguments, BrowseTool
from tools_sandbox.config import BrowseConfig, ConfigError
from tools_sandbox.tool import in_thread


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1",
        "192.0.0.192", "168.63.129.16", "100.100.100.200", "192.88.99.1", "64:ff9b:1::7f00:1", "64:ff9b:1:ffff::1",
        "fec0::1", "::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "5f00::1", "3fff::1", "2001:2::1", "100::1",
        "::ffff:168.63.129.16", "64:ff9b::c000:c0", "4000::1",
    ],
)  # fmt: skip
def test_policy_refuses_nonpublic_address(address: str) -> None:
    assert not AddressPolicy(()).permits(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "1.1.1.1", "2606:4700::1111", "2001:4860::1", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_policy_permits_public_address(address: str) -> None:
    assert AddressPolicy(()).permits(address)


def test_policy_refuses_own_and_denied_public_addresses() -> None:
    assert AddressPolicy((), ["1.1.1.0/24"]).permits("1.0.0.1")
    for address in ("1.1.1.1", "::ffff:1.1.1.1", "::ffff:101:101", "64:ff9b::101:101"):
        assert not AddressPolicy((), ["1.1.1.0/24"]).permits(address)
        assert AddressPolicy(["1.1.1.1/32"], ["1.1.1.0/24"]).permits(address)
    assert _is_own(ip_address("127.0.0.1"))
    assert _is_own(ip_address("::ffff:127.0.0.1"))
    assert not _is_own(ip_address("1.1.1.1"))


@pytest.mark.skipif(os.getuid() != 0, reason="gives an interface an address")
def test_policy_refuses_public_address_of_this_machine() -> None:
    code = """
import fcntl, socket, struct
from tools_sandbox.browse.addresses import AddressPolicy
from tools_sandbox.utils import linux
linux.unshare(linux.CLONE_NEWNET)
def have(address):
    request = struct.pack('16sHH4s8x', b'lo', socket.AF_INET, 0, socket.inet_aton(address))
    fcntl.ioctl(socket.socket(), 0x8916, request)  # SIOCSIFADDR
have('127.0.0.1')
assert AddressPolicy(()).permits('93.184.216.34')
have('93.184.216.34')
assert not AddressPolicy(()).permits('93.184.216.34')
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_invalid_network_is_a_config_error(parser: PageParser) -> None:
    with pytest.raises(ConfigError, match="allow_networks"):
        BrowseTool(BrowseConfig(enabled=True, allow_networks=("10.0.0.1/8",)), parser)


@pytest.mark.parametrize(
    "host",
    [FORBIDDEN, "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0",
     "127。0。0。1", "①②⑦.⓪.⓪.①"],
)  # fmt: skip
def test_no_spelling_of_inner_address_is_requested(site: Site, host: str, browse: Browse) -> None:
    site.requested.clear()
    result = browse(f"http://{host}:{site.port}/secret")
    assert result.status == "error"
    assert SECRET not in result.text
    assert not site.requested


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "http://"),
        ("ftp://example.org/", "http://"),
        ("gopher://127.0.0.1:25/", "http://"),
        ("page", "http://"),
        ("http://", "http://"),
        ("http://user:word@example.org/", "user name"),
        ("http://127.0.0.2:25/", "Port 25"),
        ("http://[::1", "no address"),
        ("http://127.0.0.2:99999/", "no address"),
        ("http://127.0.0.2/" + "a" * 5000, "longer than"),
    ],
)
def test_invalid_web_address_is_refused_with_reason(url: str, message: str, browse: Browse) -> None:
    result = browse(url)
    assert (result.status, result.negative) == ("error", True)
    assert message in result.text


def test_redirects_are_checked(site: Site, browse: Browse) -> None:
    site.requested.clear()
    result = browse(site.url("/to/inside"))
    assert "refused" in result.text
    assert SECRET not in result.text
    assert site.requested == ["/to/inside"]
    assert browse(site.url("/to/file")).status == "error"
    assert browse(site.url("/to/nonsense")).status == "error"
    loop = browse(site.url("/loop"))
    assert "more than 5 redirects" in loop.text
    assert site.requested.count("/loop") == 6


def test_dns_rebinding_reaches_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, browse: Browse) -> None:
    # A stub of a hostile name server.
    answers = [PERMITTED, FORBIDDEN, FORBIDDEN]
    real = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **more: Any) -> Any:
        return real(answers.pop(0) if host == "rebind.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    site.requested.clear()
    assert browse(f"http://rebind.example:{site.port}/secret").text == SECRET  # served by the permitted address
    assert len(answers) == 2  # resolved once: the connection uses the checked address
    again = browse(f"http://rebind.example:{site.port}/secret")
    assert "refused" in again.text
    assert site.requested == ["/secret"]


def test_silent_name_servers_block_no_other_work(
    site: Site, parser: PageParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stub of a silent name server.
    answers = threading.Event()
    real = socket.getaddrinfo

    def silent(host: Any, *rest: Any, **more: Any) -> Any:
        if str(host).startswith("silent"):
            answers.wait(20)
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", silent)

    async def run() -> tuple[list[ToolResult], float, str]:
        tool = BrowseTool(BrowseConfig(enabled=True, allow_networks=ALLOW), parser)
        # More than the threads of asyncio's default executor.
        names = [BrowseArguments(url=f"http://silent{n}.example/") for n in range(40)]
        hostile = asyncio.gather(*(tool.run(name, 1.0) for name in names))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert await in_thread(lambda: 6 * 7) == 42
        took_s = time.monotonic() - began
        page = await tool.run(BrowseArguments(url=f"http://localhost:{site.port}/secret"), 10.0)
        return await hostile, took_s, page.text

    try:
        hostile, took_s, page = asyncio.run(run())
    finally:
        answers.set()
    assert {each.status for each in hostile} == {"timeout"}
    assert took_s < 10  # after the names it would take 20 s
    assert "is refused" in page  # it was resolved, but to this machine


def test_queued_thread_work_ends_with_its_call() -> None:
    began = list[int]()

    async def run() -> bool:
        release = threading.Event()
        busy = [asyncio.create_task(in_thread(release.wait)) for _ in range(32)]
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(in_thread(began.append, 1))
        await asyncio.sleep(0.1)
        waiting.cancel()
        ended, _ = await asyncio.wait([waiting], timeout=30)
        release.set()
        await asyncio.gather(*busy)
        return bool(ended)

    assert asyncio.run(run())
    assert not began
