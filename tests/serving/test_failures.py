"""Services that fail while an agent is served, clients that leave, and servers that are no agent."""

import io
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.target import EvalTarget, TargetKind
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.services import Job
from arpo_megatron.launch.supervisor import ProcessDiedError, Supervisor
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.serving import serve
from arpo_megatron.serving.agent import Agent
from arpo_megatron.serving.chat import chat
from arpo_megatron.view.grow import Grower
from tests.rollout.growing import CODEC, LIMITS
from tests.serving.test_serve import TOKEN
from tests.tools_sandbox.helpers.served import serving

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
    agent = Agent(None, "", None, None, LIMITS, CODEC, lambda _: "")  # type: ignore[arg-type]  # no request comes

    @asynccontextmanager
    async def open_agent(*_: object) -> AsyncIterator[Agent]:
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


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_of_an_agent_that_a_command_serves_is_shown_at_once_and_ends_the_command(shown: io.StringIO) -> None:
    with (
        pytest.raises(ProcessDiedError, match="after 1 restarts"),
        serve.serving("agent", (), socket.create_server(("127.0.0.1", 0))) as (url, key),
    ):
        with pytest.raises(UserError, match="does not answer as a chat server"):
            while True:
                chat(url, key, console=Console(file=io.StringIO()), read=lambda: None)
        seen = shown.getvalue()
    assert "the agent is no longer served: engine was killed by SIGKILL, after 1 restarts" in " ".join(seen.split())


@pytest.fixture
def other() -> Iterator[Callable[..., str]]:
    """Return a function that serves fixed answers for the models and for POST requests, and returns their address."""
    running = []

    def start(models: Mapping[str, object], posted: Callable[[web.Request], object] | None = None) -> str:
        async def list_models(_: web.Request) -> web.Response:
            return web.Response(**{"content_type": "application/json", **models})  # type: ignore[arg-type]

        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        if posted is not None:
            app.router.add_post("/v1/{path:.*}", posted)  # type: ignore[arg-type]
        running.append(serving(app))
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


def test_missing_token_is_named(other: Callable[..., str]) -> None:
    url = other({"text": '{"error": {"message": "no"}}', "status": 401})
    with pytest.raises(UserError, match="missing or wrong: set ARPO_SERVE_TOKEN to that of `arpo serve`"):
        chat(url, "", console=Console(file=io.StringIO()), read=lambda: None)
