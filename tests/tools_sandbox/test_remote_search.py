"""Search engines behind HTTP: asked in their own format, at a bounded rate, again when they are busy."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.tools_sandbox.served import serving
from tests.tools_sandbox.test_service_process import refused_start
from tools_sandbox.client import SandboxClient

StartService = Callable[..., Any]


class Engine:
    """A local search engine that keeps what it was asked and answers from a list of statuses first."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[float, web.BaseRequest, Any]] = []
        self.failures: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else dict(request.query)
        self.asked.append((time.monotonic(), request, body))
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
        }
        return web.json_response(hits[request.path])


@contextmanager
def serving_engine() -> Iterator[Engine]:
    engine, app = Engine(), web.Application()
    app.router.add_route("*", "/{name}", engine.answer)
    with serving(app) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serving_engine() as running:
        yield running


def test_each_engine_is_asked_and_read_in_its_own_format(engine: Engine, start_service: StartService) -> None:
    def ask(search: dict[str, Any], env: dict[str, str] | None = None) -> tuple[str, Any, Any]:
        engine.asked.clear()
        service = start_service({"search": search}, env=env)
        with SandboxClient(service.url) as client:
            answer = client.call("search", {"query": "solaris", "k": 2})
        assert answer.status == "ok"
        ((_, request, body),) = engine.asked
        assert "word of the key" not in service.stderr()
        return answer.text, request, body

    key = {"KEY": "word of the key"}
    web_engine = {"key_variable": "KEY", "retries": 0}
    text, request, body = ask(
        {"engine": "web", "web": {"provider": "serper", "url": f"{engine.url}/serper", **web_engine}}, key
    )
    assert text == "Page 1: Lem wrote 0\nPage 2: Lem wrote 1"
    assert (body, request.headers["X-API-KEY"]) == ({"q": "solaris", "num": 2}, "word of the key")
    text, request, body = ask(
        {"engine": "web", "web": {"provider": "brave", "url": f"{engine.url}/brave", **web_engine}}, key
    )
    assert (text, body["q"]) == ("Page 1: Lem wrote it", "solaris")
    assert request.headers["X-Subscription-Token"] == "word of the key"
    text, _, body = ask({"engine": "web", "web": {"provider": "searxng", "url": f"{engine.url}/searxng"}})
    assert (text, body) == ("Page 1: Lem wrote it", {"q": "solaris", "format": "json"})
    text, _, body = ask({"engine": "dense", "dense": {"url": f"{engine.url}/dense"}})
    assert (text, body) == ("Page 1: Solaris: by Lem", {"queries": ["solaris"], "topk": 2})


def test_a_busy_engine_is_asked_again_at_a_bounded_rate_and_a_dead_one_is_told(
    engine: Engine, start_service: StartService, tmp_path: Path
) -> None:
    (tmp_path / "cache.json").write_text(json.dumps({"remembered": "Page 1: of old"}))
    search = {
        "engine": "web",
        "web": {"provider": "searxng", "url": f"{engine.url}/searxng", "requests_per_s": 5, "retries": 1},
        "sources": [{"path": str(tmp_path / "cache.json"), "format": "arpo_cache"}],
    }
    service = start_service({"search": search})
    engine.asked.clear()
    with SandboxClient(service.url) as client:
        assert client.call("search", {"query": "Remembered"}).text == "Page 1: of old"
        assert not engine.asked  # what is remembered costs no request
        engine.failures = [429]
        began = time.monotonic()
        assert client.call("search", {"query": "busy"}).text == "Page 1: Lem wrote it"
        assert time.monotonic() - began >= 1  # as Retry-After said
        engine.failures = [500, 500]
        failed = client.call("search", {"query": "dead"})
        assert (failed.status, "not the fault" in failed.text, "127.0.0.1" in failed.text) == ("error", True, False)
        again = client.call("search", {"query": "dead"})
        assert (again.status, again.cached) == ("ok", False)  # its failure was not remembered
        engine.failures = [403]
        assert client.call("search", {"query": "denied"}).status == "error"
        engine.asked.clear()
        threads = [threading.Thread(target=client.call, args=("search", {"query": f"q{n}"})) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    times = sorted(at for at, _, _ in engine.asked)
    assert len(times) == 10
    assert times[-1] - times[0] >= 9 / 5 - 0.8  # the first may have come late


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("{engine: web}", "search.web"),
        ("{engine: dense}", "search.dense"),
        ("{engine: web, web: {provider: searxng}}", "search.web.url"),
        ("{engine: web, web: {provider: serper}}", "search.web.key_variable"),
        ("{engine: web, web: {provider: serper, key_variable: NO_SUCH_KEY}}", "NO_SUCH_KEY"),
        ("{engine: dense, dense: {url: 'http://x'}, sources: [{path: c.jsonl, format: jsonl}]}", "c.jsonl"),
    ],
)
def test_an_engine_that_lacks_something_is_one_line(tmp_path: Path, search: str, said: str) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "c.yaml").write_text(f"search: {search}\n")
    assert said in refused_start("--config", str(tmp_path / "c.yaml"))


def test_odd_and_empty_answers_are_told_apart(engine: Engine, start_service: StartService) -> None:
    for path, status, text in (("nothing", "ok", "No results found."), ("odd", "error", "not the fault")):
        search = {"engine": "web", "web": {"provider": "searxng", "url": f"{engine.url}/{path}", "retries": 0}}
        with SandboxClient(start_service({"search": search}).url) as client:
            answer = client.call("search", {"query": "x"})
            assert (answer.status, text in answer.text) == (status, True)
