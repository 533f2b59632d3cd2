"""Search engines behind HTTP: request formats, rate limit, retries, and failures."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from pydantic import TypeAdapter

from tests.tools_sandbox.helpers.served import serving
from tools_sandbox.answers import ToolResult
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import ConfigError, DenseConfig, SearchConfig, WebConfig
from tools_sandbox.search.remote import WebEngine
from tools_sandbox.search.tool import SearchArguments, SearchTool
from tools_sandbox.tool import ToolBroken, broken_result

StartService = Callable[..., Any]


class FakeEngine:
    """A search engine that records its requests. It first answers with the statuses in `failures`."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[float, web.BaseRequest, Any]] = []
        self.failures: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else dict(request.query)
        self.requests.append((time.monotonic(), request, body))
        if self.failures:
            status = self.failures.pop(0)
            return web.Response(status=status, headers={"Retry-After": "1"} if status == 429 else {})
        hits: dict[str, Any] = {
            "/serper": {"organic": [{"snippet": f"Lem\nwrote {n}"} for n in range(9)]},
            "/brave": {"web": {"results": [{"description": "Lem wrote it"}]}},
            "/searxng": {"results": [{"content": "Lem wrote it"}, {"title": "without text"}]},
            "/dense": {"result": [[{"document": {"title": "Solaris", "contents": "by Lem"}, "score": 1.0}]]},
            "/nothing": {"searchParameters": {}},
            "/odd": ["what?"],
            "/partly": {"results": ["x", None, {"content": "Lem wrote it"}], "result": [["x", {}, {"text": "by Lem"}]]},
            "/unread": {"results": ["x"], "result": [[{"document": None}]]},
        }
        return web.json_response(hits[request.path])


def search_in_process(config: SearchConfig, query: str, k: int | None = None) -> ToolResult:
    """Run the search tool in this process."""

    async def run() -> ToolResult:
        tool = SearchTool(config)
        await tool.start()
        try:
            return await tool.run(SearchArguments(query=query, k=k), 10.0)
        finally:
            await tool.stop()

    return asyncio.run(run())


@contextmanager
def serving_engine() -> Iterator[FakeEngine]:
    engine, app = FakeEngine(), web.Application()
    app.router.add_route("*", "/{name}", engine.answer)
    with serving(app) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with serving_engine() as running:
        yield running


def test_each_engine_is_queried_in_its_format(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "the key")

    def search(**config: Any) -> tuple[str, Any, Any]:
        engine.requests.clear()
        text = search_in_process(SearchConfig(**config), "solaris", k=2).text
        ((_, request, body),) = engine.requests
        return text, request, body

    serper = WebConfig("serper", url=f"{engine.url}/serper", key_variable="KEY", retries=0)
    text, request, body = search(engine="web", web=serper)
    assert text == "Page 1: Lem wrote 0\nPage 2: Lem wrote 1"
    assert (body, request.headers["X-API-KEY"]) == ({"q": "solaris", "num": 2}, "the key")
    brave = WebConfig("brave", url=f"{engine.url}/brave", key_variable="KEY", retries=0)
    text, request, body = search(engine="web", web=brave)
    assert (text, body["q"]) == ("Page 1: Lem wrote it", "solaris")
    assert request.headers["X-Subscription-Token"] == "the key"
    text, request, body = search(engine="web", web=WebConfig("searxng", url=f"{engine.url}/searxng"))
    assert "Authorization" not in request.headers
    private = WebConfig("searxng", url=f"{engine.url}/searxng", key_variable="KEY")
    assert search(engine="web", web=private)[1].headers["Authorization"] == "Bearer the key"
    assert (text, body) == ("Page 1: Lem wrote it", {"q": "solaris", "format": "json"})
    text, _, body = search(engine="dense", dense=DenseConfig(f"{engine.url}/dense"))
    assert (text, body) == ("Page 1: Solaris: by Lem", {"queries": ["solaris"], "topk": 2})


def test_busy_engine_is_retried_at_bounded_rate(
    engine: FakeEngine, start_service: StartService, tmp_path: Path
) -> None:
    (tmp_path / "cache.json").write_text(json.dumps({"remembered": "Page 1: old"}))
    search = {
        "engine": "web",
        "web": {
            "provider": "serper",
            "url": f"{engine.url}/serper",
            "key_variable": "KEY",
            "requests_per_s": 10,
            "retries": 1,
        },
        "sources": [{"path": str(tmp_path / "cache.json"), "format": "arpo_cache"}],
    }
    service = start_service({"search": search, "workers": 1}, env={"KEY": "the key of the engine"})
    engine.requests.clear()
    with SandboxClient(service.url) as client:
        assert client.call("search", {"query": "Remembered"}).text == "Page 1: old"
        assert not engine.requests  # remembered queries need no request
        engine.failures = [429]
        began = time.monotonic()
        assert client.call("search", {"query": "busy", "k": 1}).text == "Page 1: Lem wrote 0"
        assert time.monotonic() - began >= 1  # the pause of Retry-After
        engine.failures = [500, 500]
        failed = client.call("search", {"query": "dead"})
        assert (failed.status, "not the fault" in failed.text, "127.0.0.1" in failed.text) == ("error", True, False)
        again = client.call("search", {"query": "dead"})
        assert (again.status, again.cached) == ("ok", False)  # the failure was not cached
        engine.failures = [403]
        assert client.call("search", {"query": "denied"}).status == "error"
        engine.requests.clear()
        threads = [threading.Thread(target=client.call, args=("search", {"query": f"q{n}"})) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    times = sorted(at for at, _, _ in engine.requests)
    assert len(times) == 10
    assert times[-1] - times[0] >= 9 / 10 - 0.4  # the first may have been delayed
    assert "the key of the engine" not in service.stderr()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"engine": "web"}, "search.web"),
        ({"engine": "dense"}, "search.dense"),
        ({"engine": "web", "web": {"provider": "searxng"}}, "search.web.url"),
        ({"engine": "web", "web": {"provider": "serper"}}, "search.web.key_variable"),
        ({"engine": "web", "web": {"provider": "serper", "key_variable": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        (
            {"engine": "dense", "dense": {"url": "http://x"}, "sources": [{"path": "c.jsonl", "format": "jsonl"}]},
            "c.jsonl",
        ),
    ],
)
def test_incomplete_engine_is_a_config_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchTool(TypeAdapter(SearchConfig).validate_python(config))


def test_empty_answer_differs_from_malformed_answer(engine: FakeEngine) -> None:
    def search(path: str) -> ToolResult:
        web_config = WebConfig("searxng", url=f"{engine.url}/{path}", retries=0)
        return search_in_process(SearchConfig(engine="web", web=web_config), "x")

    assert search("nothing") == ToolResult("ok", "No results found.", negative=True)
    with pytest.raises(ToolBroken, match="another format"):
        search("odd")


def test_malformed_hit_is_skipped_unless_all_are(engine: FakeEngine) -> None:
    def search(path: str, kind: Literal["web", "dense"]) -> ToolResult:
        web_config = WebConfig("searxng", url=f"{engine.url}/{path}", retries=0)
        dense_config = DenseConfig(f"{engine.url}/{path}", retries=0)
        return search_in_process(SearchConfig(engine=kind, web=web_config, dense=dense_config), "x", k=1)

    assert search("partly", "web").text == "Page 1: Lem wrote it"
    assert search("partly", "dense").text == "Page 1: by Lem"
    for kind in ("web", "dense"):
        with pytest.raises(ToolBroken, match="another format"):
            search("unread", kind)


def test_cap_of_requests_holds_over_restarts_and_cached_answers_are_free(
    engine: FakeEngine, start_service: StartService, tmp_path: Path
) -> None:
    paid = {"provider": "searxng", "url": f"{engine.url}/searxng", "max_requests": 3}
    config = {
        "search": {"engine": "web", "web": {**paid, "count_path": str(tmp_path / "count")}},
        "cache": {"sqlite_path": str(tmp_path / "answers.sqlite")},
        "workers": 1,
    }
    engine.requests.clear()
    for queries, statuses in (("ab", ["ok", "ok"]), ("abcd", ["ok", "ok", "ok", "error"])):
        service = start_service(config)
        with SandboxClient(service.url) as client:
            answers = [client.call("search", {"query": query}) for query in queries]
        assert [answer.status for answer in answers] == statuses
        service.process.terminate()
        service.process.wait(60)
    assert len(engine.requests) == 3
    assert answers[-1].failure == "blocked"
    assert answers[-1].text.startswith("The search tool is blocked: search.web.max_requests=3 is reached; ")


def test_count_of_requests_survives_full_disk(tmp_path: Path) -> None:
    program = (
        "import pathlib, resource, signal, sys; from tools_sandbox.utils.http_retry import RequestBudget; "
        "budget = RequestBudget(9, pathlib.Path(sys.argv[1])); budget.spend(); budget.spend(); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "budget.spend()"
    )
    count = tmp_path / "count"
    done = subprocess.run([sys.executable, "-c", program, count], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert int(count.read_text()) == 2


def test_count_of_requests_that_cannot_be_locked_ends_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(count: Path) -> None:
        WebEngine(WebConfig("searxng", url="http://127.0.0.1:9", max_requests=3, count_path=count))

    with pytest.raises(ConfigError, match=r"search\.web\.count_path: .* \(No such file or directory\): name a file"):
        build(tmp_path / "absent" / "count")

    def no_locks(*_: object) -> None:  # a double: no file system here is without locks
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"count cannot be locked \(No locks available\): name a file on another"):
        build(tmp_path / "count")


@pytest.mark.parametrize(
    ("statuses", "failure"), [([503], "temporary"), ([404], "temporary"), ([402], "blocked"), ([429], "temporary")]
)
def test_failure_of_the_provider_is_marked(engine: FakeEngine, statuses: list[int], failure: str) -> None:
    engine.failures = list(statuses)
    with pytest.raises(ToolBroken) as raised:
        search_in_process(
            SearchConfig(engine="web", web=WebConfig("searxng", url=f"{engine.url}/searxng", retries=0)), "x"
        )
    engine.failures = [400]
    web_config = WebConfig("searxng", url=f"{engine.url}/searxng", retries=0)
    rejected = search_in_process(SearchConfig(engine="web", web=web_config), "x")
    assert (rejected.status, rejected.failure) == ("error", "none"), "the query is at fault"
    result = broken_result("search", raised.value)
    assert (result.failure, "127.0.0.1" in result.text) == (failure, False)
