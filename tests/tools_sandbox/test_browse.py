"""Browse: public pages become text, hostile pages cost bounded time and memory, private addresses are unreachable."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.browsing import ALLOW, Browse
from tests.tools_sandbox.helpers.hostile_site import BOMB_BYTES, FORBIDDEN, SECRET, Site
from tests.tools_sandbox.helpers.services import read_walls, wait_until, wait_until_gone
from tools_sandbox.answers import ToolResult
from tools_sandbox.browse.page import FetchFailed, Page
from tools_sandbox.browse.parser import PageParser
from tools_sandbox.browse.summary import Summary
from tools_sandbox.browse.text import decode, readable
from tools_sandbox.browse.tool import BrowseArguments, BrowseTool
from tools_sandbox.client import SandboxClient, SandboxUnavailable
from tools_sandbox.config import BrowseConfig, ConfigError, PythonConfig, SummaryConfig
from tools_sandbox.python_tool.protocol import Outcome


def test_page_becomes_title_and_main_text(site: Site, browse: Browse) -> None:
    result = browse(site.url("/page"))
    assert result.status == "ok"
    assert result.text.startswith("Qzlf & Co\n\nThe town of Qzlf has 417 inhabitants")
    assert "<" not in result.text
    assert browse(site.url("/chain/3")).text == result.text


@pytest.mark.parametrize("path", ["/bomb", "/bomb-of-bombs"])
def test_gzip_bomb_is_cut_in_little_memory(site: Site, path: str, browse: Browse) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    browse(site.url(path), max_bytes=1_000_000)
    assert time.monotonic() - began < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BOMB_BYTES / 3


@pytest.mark.parametrize(("path", "message"), [("/twice-packed", "not asked for"), ("/not-packed", "unpacked")])
def test_unsupported_encoding_is_refused_with_reason(site: Site, path: str, message: str, browse: Browse) -> None:
    assert message in browse(site.url(path)).text


def test_truncated_gzip_page_is_marked_cut(site: Site, browse: Browse) -> None:
    whole = browse(site.url("/packed")).text
    assert "cut" not in whole
    cut = browse(site.url("/packed-and-cut")).text
    assert re.fullmatch(r".*417 inhabitants.*\[page cut after \d+ bytes\]", cut, re.DOTALL)


@pytest.mark.parametrize("path", ["/packed/members", "/packed/deflate", "/packed/deflate-alone"])
def test_compressed_page_is_read_completely(site: Site, path: str, browse: Browse) -> None:
    assert browse(site.url(path)).text == browse(site.url("/page")).text


@pytest.mark.parametrize("path", ["/packed/member-and-junk", "/packed/member-and-cut"])
def test_invalid_data_after_gzip_member_marks_page_cut(site: Site, path: str, browse: Browse) -> None:
    assert re.fullmatch(r".*417 inhabitants.*\[page cut after \d+ bytes\]", browse(site.url(path)).text, re.DOTALL)


def test_many_empty_gzip_members_cost_no_time(site: Site, browse: Browse) -> None:
    began = time.process_time()
    assert browse(site.url("/packed/members-of-nothing")).status in ("ok", "error")
    assert time.process_time() - began < 2


def test_endless_body_is_read_up_to_limit(site: Site, browse: Browse) -> None:
    site.sent_bytes = 0
    result = browse(site.url("/endless"), max_bytes=500_000, max_chars=1_000_000)
    assert result.status == "ok"
    assert result.text.endswith("[page cut after 500000 bytes]")
    assert site.sent_bytes < 20_000_000  # what fits into buffers


def test_slow_body_ends_at_time_limit(site: Site, browse: Browse) -> None:
    began = time.monotonic()
    assert browse(site.url("/drip"), timeout_s=0.7).status == "timeout"
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("path", ["/latin", "/utf8-as-latin"])
def test_wrong_charset_declaration_is_corrected(site: Site, path: str, browse: Browse) -> None:
    assert "The café of Qzlf" in browse(site.url(path)).text


def test_other_pages_get_readable_answers(site: Site, browse: Browse) -> None:
    assert browse(site.url("/zip-charset")).status == "ok"
    assert "417" in browse(site.url("/nul")).text
    assert browse(site.url("/image")).text.endswith("is no text but image/png.")
    assert "no readable text" in browse(site.url("/empty")).text
    assert browse(site.url("/headers")).status == "error"
    assert browse(site.url("/busy")) == ToolResult(
        "error", f"{site.url('/busy')} cannot be read: HTTP 503 Service Unavailable."
    )
    assert browse(site.url("/missing")).negative
    long = browse(site.url("/page"), max_chars=100)
    assert long.text.endswith("the first 100 are shown]")


def test_no_cookie_is_kept(site: Site, browse: Browse) -> None:
    assert [browse(site.url("/cookie")).text for _ in range(2)] == ["{}", "{}"]


def test_robots_txt_is_honoured_if_configured(site: Site, browse: Browse) -> None:
    assert "robots.txt" in browse(site.url("/page"), robots=True).text
    assert browse(site.url("/secret"), robots=True).text == SECRET
    site.requested.clear()
    assert "robots.txt" in browse(site.url("/chain/1"), robots=True).text  # redirects to /page
    assert "/page" not in site.requested


def test_page_is_summarised_if_configured(site: Site, monkeypatch: pytest.MonkeyPatch, browse: Browse) -> None:
    monkeypatch.setenv("MODEL_KEY", "k1")
    site.requested.clear()
    endpoint = {"url": site.url("/v1", FORBIDDEN), "key_variable": "MODEL_KEY"}  # the operator's address is not checked
    result = browse(site.url("/page"), summary=SummaryConfig(model="m", **endpoint))
    assert result == ToolResult("ok", "417 live in Qzlf.")
    assert site.requested[-1].startswith("Bearer k1 m ")
    assert "417 inhabitants" in site.requested[-1]
    without = browse(site.url("/page"), summary=SummaryConfig(model="absent", **endpoint))
    assert (without.status, without.failure) == ("error", "temporary")
    assert without.text.startswith("[no summary")
    assert "417 inhabitants" in without.text
    monkeypatch.delenv("MODEL_KEY")
    with pytest.raises(ConfigError, match="MODEL_KEY"):
        browse(site.url("/page"), summary=SummaryConfig(model="m", **endpoint))


@pytest.mark.parametrize("model", ["silent", "blank"])
def test_summary_without_text_is_no_result(site: Site, browse: Browse, model: str) -> None:
    result = browse(site.url("/page"), summary=SummaryConfig(url=site.url("/v1"), model=model))
    assert (result.status, result.failure) == ("error", "temporary")


def test_summary_that_takes_too_long_is_no_timeout_of_the_call(monkeypatch: pytest.MonkeyPatch, browse: Browse) -> None:
    async def page(*_: object) -> str:
        return "a page"

    async def never(*_: object) -> str:
        await asyncio.sleep(5)
        return "too late"

    monkeypatch.setattr(BrowseTool, "_read", page)
    monkeypatch.setattr(Summary, "answer", never)
    result = browse("http://x/", timeout_s=0.1, summary=SummaryConfig(url="http://x/v1", model="m"))
    assert (result.status, result.failure) == ("error", "temporary")


@settings(max_examples=50)
@given(
    st.binary(max_size=300), st.sampled_from([None, "utf-8", "utf-16", "latin-1", "zip", "idna", "\udcff", "x" * 50])
)
def test_any_bytes_decode(body: bytes, charset: str | None) -> None:
    assert isinstance(decode(Page("http://x/", "text/html", charset, body, cut=False)), str)


@settings(max_examples=40)
@given(st.text(max_size=100))
def test_utf8_is_read_as_utf8_despite_declaration(text: str) -> None:
    body = text.encode()
    if not body.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        assert decode(Page("http://x/", "text/plain", "latin-1", body, cut=False)) == text
        assert readable(Page("http://x/", "text/plain", None, body, cut=False)) == text


def test_service_survives_hostile_pages(site: Site, start_service: Callable[..., Any]) -> None:
    config = {"enabled": True, "allow_networks": list(ALLOW), "max_bytes": 3_000_000}
    service = start_service({"browse": config, "workers": 1, "cache": {"negative_s": 1.5}})
    with SandboxClient(service.url) as client:
        for path in ("/nested", "/bomb", "/drip", "/loop", "/to/inside"):
            answer = client.call("browse", {"url": site.url(path)}, timeout_s=1 if path == "/drip" else 5)
            assert SECRET not in answer.text
        assert "417" in client.call("browse", {"url": site.url("/page")}).text
        assert client.call("browse", {"url": site.url("/page")}).cached
        missing = {"url": site.url("/missing")}
        site.requested.clear()
        assert [client.call("browse", missing).cached for _ in range(3)] == [False, True, True]
        wait_until(lambda: not client.call("browse", missing).cached)  # the entry expires
        busy = {"url": site.url("/busy")}
        assert [client.call("browse", busy).cached for _ in range(2)] == [False, False]
        assert site.requested == ["/missing"] * 2 + ["/busy"] * 2


def test_slow_parsing_blocks_neither_search_nor_browse(
    site: Site, start_service: Callable[..., Any], tmp_path: Path
) -> None:
    corpus = tmp_path / "facts.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"fact{n}"}) + "\n" for n in range(50)))
    search = {"sources": [{"path": str(corpus), "format": "jsonl"}]}
    config = {"enabled": True, "allow_networks": list(ALLOW)}
    service = start_service({"browse": config, "search": search, "workers": 1, "max_concurrency": 40})
    with SandboxClient(service.url) as client, ThreadPoolExecutor(32) as pool:
        assert "417" in client.call("browse", {"url": site.url("/page")}).text
        (worker,) = service.workers()
        # More than the threads of asyncio's default executor.
        hostile = [
            pool.submit(client.call, "browse", {"url": site.url(f"/breaks/{n}")}, timeout_s=3, trajectory_id="evil")
            for n in range(min(32, (os.cpu_count() or 1) + 4) + 1)
        ]
        time.sleep(1)
        for number in range(5):
            answer = client.call("search", {"query": f"fact{number}"}, timeout_s=4)
            assert (answer.status, answer.text) == ("ok", f"Page 1: fact{number}")
        assert {each.result().status for each in hostile} <= {"ok", "timeout"}
        wait_until(lambda: len(worker.children(recursive=True)) == 1)  # the process that parsers are forked from
        assert service.workers() == [worker]  # it was not replaced


def test_parser_memory_is_bounded(site: Site, browse: Browse) -> None:
    assert browse(site.url("/links")).status == "ok"
    config = BrowseConfig(enabled=True, allow_networks=ALLOW, parse_mib=32)
    small = PageParser(config, PythonConfig())
    small.start()
    try:
        read = BrowseTool(config, small).run
        assert asyncio.run(read(BrowseArguments(url=site.url("/links")), 20.0))[::2] == ("error", True)
        assert "417" in asyncio.run(read(BrowseArguments(url=site.url("/page")), 20.0)).text
    finally:
        small.close()


def test_text_whose_escapes_are_longest_is_read_completely(site: Site, browse: Browse) -> None:
    """Each character of this page is a JSON escape of 12 characters."""
    assert browse(site.url("/emoji"), max_chars=100_000).text == "\U0001f600" * 100_000


def test_page_that_takes_too_long_to_parse_is_a_timeout(site: Site) -> None:
    config = BrowseConfig(enabled=True, allow_networks=ALLOW)
    parser = PageParser(config, PythonConfig())
    parser.start()
    try:
        parser._config = replace(config, timeout_s=0.001)  # its processes keep the longer limit of the service
        answer = asyncio.run(BrowseTool(config, parser).run(BrowseArguments(url=site.url("/page")), 60.0))
    finally:
        parser.close()
    assert (answer.status, answer.negative) == ("timeout", False)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        *((text, "cannot be parsed") for text in ("[" * 9000, "{", "[]")),
        ('{"failed": "' + "x" * 11 + '", "lasting": true}', "^x{10}$"),
    ],
)
def test_odd_answer_of_parser_fails_the_page(monkeypatch: pytest.MonkeyPatch, text: str, failure: str) -> None:
    """A page that controls its parser may let it answer anything."""
    controlled = PageParser(BrowseConfig(), PythonConfig())

    async def answer(*_: object, **__: object) -> Outcome:
        return Outcome("ok", text)

    monkeypatch.setattr(controlled._pool, "run", answer)
    with pytest.raises(FetchFailed, match=failure):
        asyncio.run(controlled.parse(Page("http://x/", "text/html", None, b"", cut=False), 10))


def test_parser_is_isolated_and_ends_with_killed_service(site: Site, start_service: Callable[..., Any]) -> None:
    summary = {"url": site.url("/v1"), "model": "m", "key_variable": "MODEL_KEY"}
    browse = {"enabled": True, "allow_networks": list(ALLOW), "summary": summary}
    service = start_service({"browse": browse, "workers": 1}, env={"MODEL_KEY": "k1"})
    (worker,) = service.workers()
    with ThreadPoolExecutor(1) as pool, SandboxClient(service.url, retries=0) as client:
        call = pool.submit(client.call, "browse", {"url": site.url("/breaks")}, timeout_s=30)
        wait_until(lambda: bool(parsing_processes(worker)))
        (parsing,) = parsing_processes(worker)
        assert read_walls(parsing) == ("2", 0, "1")
        assert "MODEL_KEY" not in Path(f"/proc/{parsing.pid}/environ").read_text()
        networks = {Path(f"/proc/{each.pid}/ns/net").readlink() for each in (parsing, worker)}
        assert len(networks) == 2
        family = service.family()
        service.process.kill()
        wait_until_gone(family)
        assert isinstance(call.exception(), SandboxUnavailable)


def parsing_processes(worker: psutil.Process) -> list[psutil.Process]:
    """Return the processes that parse a page: busy ones without children, except the one that they are forked from."""
    below = [each for each in worker.children(recursive=True) if each.ppid() != worker.pid]
    parents = {each.ppid() for each in below}
    return [each for each in below if each.pid not in parents and each.cpu_times().user > 0.2]
