"""Services that fail while an agent is served, clients that leave, and servers that are no agent."""

import asyncio
import io
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
from aiohttp import web
from rich.console import Console

from arpo_megatron.cli.main import run_command
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.target import EvalTarget, TargetKind
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.services import Job
from arpo_megatron.launch.supervisor import ProcessDiedError, Supervisor
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.serving import app, serve
from arpo_megatron.serving.agent import ServedAgent
from arpo_megatron.serving.chat import chat
from arpo_megatron.view.grow import Grower
from arpo_megatron.view.server import listen
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PLAN, PROMPT, planned
from tests.serving.test_serve import QUESTION, TOKEN, WRITTEN, Start, client, served
from tests.tools_sandbox.helpers.served import serving
from tests.tools_sandbox.helpers.services import wait_until
from tools_sandbox.utils.logs import RarerAndRarer

CHUNK = b'data: {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": []}\n\n'
MODELS = {"text": '{"data": [{"id": "m"}]}'}


class Restarting(Supervisor):
    """Doubles for a supervisor whose engine is restarted once, and then fails for good."""

    checks_left = 2

    def check(self) -> None:
        if self.checks_left == 0:
            raise ProcessDiedError("engine was killed by SIGKILL, after 1 restarts")
        if self.checks_left == 2:
            EventLog(self._logs / "events.jsonl").emit(
                "restart", service="engine", state="down", text="engine was killed by SIGKILL; restart 1 of 1 in 1 s"
            )
        self.checks_left -= 1


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    """Replace the services of `arpo_megatron.serving.serve` by doubles whose engine fails; return their terminal."""
    shown = io.StringIO()
    job = Job(
        JobConfig(name="test"), RunDirectory(tmp_path), Restarting(tmp_path), Progress(Console(file=shown, width=200))
    )
    agent = ServedAgent(None, "", None, None, LIMITS, CODEC, lambda _: "")  # type: ignore[arg-type]  # no request comes

    @asynccontextmanager
    async def open_agent(*_: object) -> AsyncIterator[ServedAgent]:
        yield agent

    target = EvalTarget(TargetKind.MODEL, "agent", model=tmp_path)
    monkeypatch.setattr(serve, "plan", lambda *_, **__: (target, JobConfig(name="test")))
    monkeypatch.setattr(serve, "agent_services", lambda *_: nullcontext((job, None)))
    monkeypatch.setattr(serve, "open_agent", open_agent)
    monkeypatch.setattr(serve, "_POLL_S", 0.01)
    return shown


def test_restarts_of_services_are_shown_while_an_agent_is_served(
    shown: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    request = serve.ServeRequest("agent", (), plain=False, token=TOKEN, concurrency=1)
    with pytest.raises(ProcessDiedError):
        serve.serve(request, lambda: (socket.create_server(("127.0.0.1", 0)), "http://127.0.0.1"))
    assert "next: ARPO_SERVE_TOKEN=TOKEN arpo chat http://127.0.0.1/v1\n" in shown.getvalue() + capfd.readouterr().err
    assert shown.getvalue().count("engine was killed by SIGKILL; restart 1 of 1 in 1 s") == 1


def test_warnings_that_strangers_can_cause_are_limited(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [])
    request = serve.ServeRequest("agent", (), plain=False, token=TOKEN, concurrency=1)
    with pytest.raises(ProcessDiedError):
        serve.serve(request, lambda: (socket.create_server(("127.0.0.1", 0)), "http://127.0.0.1"))
    assert [type(each) for each in logger.filters] == [RarerAndRarer], shown.getvalue()


def test_address_that_cannot_be_used_is_refused_before_the_services_start(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "agent_services", lambda *_: pytest.fail("the services start"))
    request = serve.ServeRequest("agent", (), plain=False, token=TOKEN, concurrency=1)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="is in use"):
        serve.serve(request, lambda: (listen("127.0.0.1", taken.getsockname()[1]), ""))


@pytest.mark.parametrize(("value", "options", "printed"), [("given", [], 0), ("", ["--token"], 1), ("", [], 0)])
def test_token_that_is_set_is_asked_for_and_one_that_is_made_is_printed(
    value: str, options: list[str], printed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[serve.ServeRequest] = []
    monkeypatch.setattr(serve, "serve", lambda request, _bind: asked.append(request))
    monkeypatch.setenv("ARPO_SERVE_TOKEN", value)
    assert run_command(["serve", "agent", *options]) == 0
    shown = capsys.readouterr().err
    assert shown.count("token: ") == printed
    assert asked[0].token == (shown.split()[1] if printed else value or None)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_of_an_agent_that_a_command_serves_is_shown_at_once_and_ends_the_command(shown: io.StringIO) -> None:
    with (
        pytest.raises(ProcessDiedError, match="after 1 restarts"),
        serve.serving("agent", (), socket.create_server(("127.0.0.1", 0))) as (url, key),
    ):
        with pytest.raises(UserError, match="does not answer as a chat server"):
            while True:
                chat(url, key, console=Console(file=io.StringIO()), read=lambda: None)
        failure = "the agent is no longer served: engine was killed by SIGKILL, after 1 restarts"
        wait_until(lambda: failure in " ".join(shown.getvalue().split()))


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(600)
    return web.Response()


def test_answer_of_a_client_that_leaves_is_cancelled(sandbox_url: str) -> None:
    engine = web.Application()
    engine.router.add_post("/generate", hang)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    bodies = {
        "chat/completions": {"messages": QUESTION},
        "continuations": {"token_ids": CODEC.encode(PROMPT), "prompt_tokens": len(PROMPT)},
    }
    with serving(engine) as port, served(f"http://127.0.0.1:{port}", sandbox_url, concurrency=1) as url:

        def shows(number: int) -> bool:
            rows = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
            return {f"arpo_serve_requests_total {number}", "arpo_serve_running 0"} <= {*rows}

        for number, (path, body) in enumerate(bodies.items(), 1):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=0.3)
            wait_until(partial(shows, number))


def test_end_of_the_server_waits_for_an_answer_in_progress(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch, scripted_engine: Start, sandbox_url: str
) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), delay_s=lambda _text: 0.3))

    @asynccontextmanager
    async def open_agent(*_: object) -> AsyncIterator[ServedAgent]:
        async with aiohttp.ClientSession() as session, ToolClient(sandbox_url, retry_for_s=5.0) as tools:
            yield ServedAgent(session, engine.url, None, tools, LIMITS, CODEC, lambda messages: messages[-1]["content"])

    monkeypatch.setattr(serve, "open_agent", open_agent)
    monkeypatch.setattr(Restarting, "check", lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        with serve.serving("agent", (), socket.create_server(("127.0.0.1", 0))) as (url, key):
            asking = client(url.removesuffix("/v1"), key).chat.completions
            answer = pool.submit(asking.create, model="agent", messages=QUESTION)
            wait_until(lambda: len(engine.requests) > 0)
        assert answer.result().choices[0].message.content == WRITTEN


def test_engine_that_hangs_or_ends_in_the_middle_is_no_traceback(
    sandbox_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        assert request.transport is not None
        request.transport.close()
        return answer

    monkeypatch.setattr(app, "_HEALTH_S", 0.1)
    engine = web.Application()
    engine.router.add_get("/health", hang)
    engine.router.add_post("/v1/chat/completions", cut)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with serving(engine) as port, served(f"http://127.0.0.1:{port}", sandbox_url, plain=True) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "engine down"}
        with pytest.raises(openai.APIError, match="payload"):
            list(client(url).chat.completions.create(model="agent", messages=QUESTION, stream=True))
        assert "arpo_serve_errors_total 1\n" in httpx.get(f"{url}/metrics", headers=headers).text
    assert "Traceback" not in caplog.text


@pytest.fixture
def other() -> Iterator[Callable[..., str]]:
    """Return a function that serves fixed answers for the models and for POST requests, and returns their address."""
    running = []

    def start(models: Mapping[str, object], posted: Callable[[web.Request], object] | None = None) -> str:
        async def list_models(_: web.Request) -> web.Response:
            return web.Response(**{"content_type": "application/json", **models})  # type: ignore[arg-type]

        server = web.Application()
        server.router.add_get("/v1/models", list_models)
        if posted is not None:
            server.router.add_post("/v1/{path:.*}", posted)  # type: ignore[arg-type]
        running.append(serving(server))
        return f"http://127.0.0.1:{running[-1].__enter__()}"

    yield start
    for each in running:
        each.__exit__(None, None, None)


@pytest.mark.parametrize(
    "answer",
    [
        {"text": '{"models": []}'},
        {"text": '{"data": null}'},
        {"text": '{"data": []}'},
        {"text": "[]"},
        {"text": "<html>Log in</html>", "content_type": "text/html"},
        {"text": "<html>Log in</html>"},
        {"text": '{"error": "no such page"}', "status": 404},
    ],
)
def test_server_that_is_no_agent_is_refused_in_one_line(other: Callable[..., str], answer: dict[str, object]) -> None:
    url = other(answer)
    with pytest.raises(UserError, match="does not answer as a chat server"):
        chat(url, "", console=Console(file=io.StringIO()), read=lambda: None)
    with pytest.raises(UserError, match=r"does not answer as `arpo serve`|refuses: HTTP status 404"):
        Grower(url, "").weights()


def test_continuations_of_another_server_are_refused(other: Callable[..., str]) -> None:
    async def posted(_: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    url = other(MODELS, posted)
    assert Grower(url, "").weights() == "m"
    with pytest.raises(UserError, match="does not answer as `arpo serve`: it returns no continuations"):
        Grower(url, "").sample({})


@pytest.mark.parametrize("rest", [b"data: {\n\n", None])
def test_stream_that_is_cut_or_unreadable_fails_one_question(other: Callable[..., str], rest: bytes | None) -> None:
    async def posted(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        if rest is None:
            assert request.transport is not None
            request.transport.close()
        else:
            await answer.write(rest)
        return answer

    url, output, said = other(MODELS, posted), io.StringIO(), iter(["1+1", "2+2", None])
    assert not chat(url, "", console=Console(file=output, width=200), read=lambda: next(said))
    assert output.getvalue().count("error: ") == 2
