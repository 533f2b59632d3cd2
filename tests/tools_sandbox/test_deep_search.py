"""Web search reads the pages of its results: local endpoints take the places of search engine, site and model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.tools_sandbox.helpers.served import serving
from tools_sandbox.answers import ToolResult
from tools_sandbox.catalog import build_tools
from tools_sandbox.config import (
    BrowseConfig,
    ConfigError,
    PagesConfig,
    SearchConfig,
    SummaryConfig,
    ToolServiceConfig,
    WebConfig,
)
from tools_sandbox.deep_search import relevant_part
from tools_sandbox.search.tool import SearchArguments
from tools_sandbox.tool import Tool

FACT = "The bridge of Qzlf has 417 stones."
PAGE = f"<html><body><article><p>{'An unrelated beginning. ' * 40}</p><p>{FACT}</p></article></body></html>"
HITS = [
    {"title": "Qzlf", "url": "/page", "content": "bridge of Qzlf 417 stones"},
    {"title": "Gone", "url": "/missing", "content": "a snippet"},
    {"title": "Third", "url": "/page", "content": "not read"},
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    async def search(request: web.Request) -> web.Response:
        own = f"http://{request.host}"
        found = [] if request.query["q"] == "nothing" else [{**hit, "url": own + hit["url"]} for hit in HITS]
        return web.json_response({"results": found})

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    async def model(request: web.Request) -> web.Response:
        question = (await request.json())["messages"][0]["content"]
        if "Query: slow" in question:
            await asyncio.sleep(9)
        answer = f"417, given {question.count('Page ')} pages and {'the fact' if FACT in question else 'nothing'}"
        return web.json_response({"choices": [{"message": {"content": answer}}]})

    app = web.Application()
    app.router.add_get("/search", search)
    app.router.add_get("/page", page)
    app.router.add_post("/v1/chat/completions", model)
    with serving(app) as found:
        yield found


def tool(port: int, pages: PagesConfig, **search: Any) -> Tool:
    web_search = WebConfig(provider="searxng", url=f"http://127.0.0.1:{port}/search")
    config = SearchConfig(**{"engine": "web", "web": web_search, "pages": pages, **search})
    browse = BrowseConfig(allow_networks=("127.0.0.0/8",))
    return build_tools(ToolServiceConfig(search=config, browse=browse))["search"]


def ask(searching: Tool, *queries: str, timeout_s: float = 60.0) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        await searching.start()
        try:
            return [await searching.run(SearchArguments(query=query), timeout_s) for query in queries]
        finally:
            await searching.stop()

    return asyncio.run(run())


def test_pages_take_the_place_of_snippets_and_a_model_may_answer_from_them(port: int) -> None:
    found, nothing = ask(tool(port, PagesConfig(results=2, context_chars=30)), "stones", "nothing")
    first, _, rest = found.text.partition("\nPage 2: ")
    assert first.startswith(f"Page 1: Qzlf (http://127.0.0.1:{port}/page)") and FACT in first and len(first) < 200
    assert rest.count("[the page was not read]") == 2 and "a snippet" in rest and "not read" in rest
    assert found.status == "ok" and found.negative, "it is asked again later, when the missing page may be there"
    assert nothing == ToolResult("ok", "No results found.", negative=True)

    summary = SummaryConfig(url=f"http://127.0.0.1:{port}/v1", model="m")
    pages = PagesConfig(results=1, summary=summary)
    (answer,) = ask(tool(port, pages, max_results=1), "stones")
    assert answer == ToolResult("ok", "417, given 1 pages and the fact")
    (late,) = ask(tool(port, pages), "slow", timeout_s=8.0)
    assert late.text.startswith("[no summary") and FACT in late.text
    assert (late.status, late.failure) == ("error", "lasting")


def test_other_engines_have_no_pages() -> None:
    with pytest.raises(ConfigError, match=r'search.pages needs search.engine "web"'):
        build_tools(
            ToolServiceConfig(search=SearchConfig(engine="dense", dense={"url": "http://x"}, pages=PagesConfig()))
        )  # type: ignore[arg-type]


def test_part_of_a_page_is_that_around_the_sentence_of_the_snippet() -> None:
    page = f"{'a. ' * 50}The cat sat on the mat.{' b.' * 50}"
    assert relevant_part(page, "cat on a mat", 6) == " a. a. The cat sat on the mat. b. b."
    assert relevant_part(page, "dogs only", 6) == page[:12]
