"""The official openai client talks to an agent: its tools run inside, and every event arrives."""

import asyncio
import io
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import uvicorn
from aiohttp import web
from rich.console import Console

from arpo_megatron.cli.main import run_command
from arpo_megatron.engine.request import Sampling
from arpo_megatron.errors import UserError
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.serving import serve
from arpo_megatron.serving.agent import ServedAgent
from arpo_megatron.serving.app import Served, application
from arpo_megatron.serving.chat import chat
from arpo_megatron.tasks.protocols.base import TextCodec
from arpo_megatron.tasks.protocols.hermes import HermesProtocol
from arpo_megatron.view.grow import Grower
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PLAN, PROMPT, planned
from tests.tools_sandbox.helpers.served import serving

Start = Callable[[ScriptedEngine], ScriptedEngine]
TOKEN = "secret"
QUESTION: Any = [{"role": "user", "content": PROMPT}]
WRITTEN = "".join(PLAN)


@contextmanager
def served(
    engine_url: str,
    sandbox_url: str,
    *,
    concurrency: int = 4,
    codec: TextCodec = CODEC,
    limits: RolloutLimits = LIMITS,
    token: str | None = TOKEN,
    plain: bool = False,
    prompt: Callable[[Any], str] = lambda messages: messages[-1]["content"],
    vocabulary: int | None = None,
) -> Iterator[str]:
    """Serve an agent from a thread; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []
    ready = threading.Event()

    async def run() -> None:
        async with aiohttp.ClientSession() as session, ToolClient(sandbox_url, retry_for_s=5.0) as tools:
            agent = ServedAgent(session, engine_url, None, tools, limits, codec, prompt, vocabulary=vocabulary)
            app = application(Served(agent, "agent", Sampling(), token, concurrency, plain, weights="export, step 4"))
            servers.append(uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")))
            ready.set()
            await servers[0].serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join(60)
        listening.close()


@pytest.fixture
def address(scripted_engine: Start, sandbox_url: str) -> Iterator[str]:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    with served(engine.url, sandbox_url) as url:
        yield url


def client(address: str, key: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_answer_has_the_text_of_the_model_and_the_steps_of_its_tools(address: str) -> None:
    assert [model.id for model in client(address).models.list()] == ["agent"]
    answer = client(address).chat.completions.create(model="agent", messages=QUESTION)
    message = answer.choices[0].message
    assert message.content == WRITTEN and answer.choices[0].finish_reason == "stop"
    steps: Any = message.model_extra["tool_steps"] if message.model_extra else []
    assert [(step["name"], step["arguments"]["code"], step["result"], step["status"]) for step in steps] == [
        ("python", "1+1", "2", "ok"),
        ("python", "2*2", "4", "ok"),
    ]
    assert answer.usage is not None and answer.usage.completion_tokens == len(WRITTEN) + 1  # and its end


def test_agent_calls_its_tools_in_the_protocol_of_the_job(scripted_engine: Start, sandbox_url: str) -> None:
    call = '<tool_call>{"name": "python", "arguments": {"code": "6*7"}}</tool_call>'

    def script(text: str) -> str:
        return "It is 42." if text.endswith("assistant\n") else call[len(text) - len(PROMPT) :]

    limits = replace(LIMITS, protocol=HermesProtocol())
    with served(scripted_engine(ScriptedEngine(script)).url, sandbox_url, limits=limits) as url:
        message = client(url).chat.completions.create(model="agent", messages=QUESTION).choices[0].message
    assert message.content == f"{call}It is 42."
    steps: Any = message.model_extra["tool_steps"] if message.model_extra else []
    assert [(step["name"], step["result"]) for step in steps] == [("python", "42")]


def test_stream_has_the_same_text_and_steps_in_their_order(address: str) -> None:
    events: list[str] = []
    for chunk in client(address).chat.completions.create(model="agent", messages=QUESTION, stream=True):
        delta = chunk.choices[0].delta
        if delta.content:
            events.append(delta.content)
        for step in getattr(delta, "tool_steps", None) or ():
            events.append(f"[{step['result']}]")
    first, second, last = PLAN
    assert "".join(events) == f"{first}[2]{second}[4]{last}"
    assert len(events) > 10, "text arrives while it is written"
    assert chunk.choices[0].finish_reason == "stop"


def test_limit_of_tokens_ends_the_answer(address: str) -> None:
    answer = client(address).chat.completions.create(model="agent", messages=QUESTION, max_tokens=10)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (PLAN[0][:10], "length")


def test_bad_requests_are_refused_with_a_reason(address: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        client(address, "other").models.list()
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.role"):
        client(address).chat.completions.create(model="agent", messages=[{"role": "robot", "content": "?"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="only system messages: add the user's question"):
        client(address).chat.completions.create(model="agent", messages=[{"role": "system", "content": "Be brief."}])
    with pytest.raises(openai.BadRequestError, match="the model's context has 1000"):
        client(address).chat.completions.create(model="agent", messages=[{"role": "user", "content": "x" * 2000}])
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert "arpo_serve_errors_total 1\n" in httpx.get(f"{address}/metrics", headers=headers).text


@pytest.mark.parametrize(
    "given", [{"stop": ["\n"]}, {"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}]
)
def test_parameter_that_would_change_the_answer_is_refused(address: str, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(openai.BadRequestError, match=f"'message': 'the agent does not honour {name}; leave it out"):
        client(address).chat.completions.create(model="agent", messages=QUESTION, **given)
    neutral: Any = {"stop": None, "tools": [], "response_format": {"type": "text"}, "user": "someone"}
    assert client(address).chat.completions.create(model="agent", messages=QUESTION, **neutral).choices


def test_body_without_a_length_is_read_up_to_the_limit(address: str) -> None:
    parts = iter([b"[" * 2**20] * 8)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{address}/v1/chat/completions", content=parts, headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_web_sites_cannot_use_a_server_without_a_token(
    headers: dict[str, str], scripted_engine: Start, sandbox_url: str
) -> None:
    with served(scripted_engine(ScriptedEngine(planned(*PLAN))).url, sandbox_url, token=None) as url:
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 403
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_request_above_the_limit_gets_429_and_a_dead_engine_503(scripted_engine: Start, sandbox_url: str) -> None:
    slow = scripted_engine(ScriptedEngine(planned(*PLAN), delay_s=lambda _text: 2.0))
    with served(slow.url, sandbox_url, concurrency=1) as url:
        first = client(url).chat.completions.create(model="agent", messages=QUESTION, stream=True)
        next(iter(first))
        with pytest.raises(openai.RateLimitError):
            client(url).chat.completions.create(model="agent", messages=QUESTION)
    with served("http://127.0.0.1:9", sandbox_url) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="the engine cannot be reached"):
            client(url).chat.completions.create(model="agent", messages=QUESTION)


def test_answer_that_the_engine_aborts_is_an_error(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), aborts=True))
    with (
        served(engine.url, sandbox_url) as url,
        pytest.raises(openai.InternalServerError, match="aborted the answer"),
    ):
        client(url).chat.completions.create(model="agent", messages=QUESTION)


@contextmanager
def plain_engine(asked: list[Any]) -> Iterator[str]:
    """Double for SGLang, which notes what it is asked."""

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": []})

    engine = web.Application()
    engine.router.add_post("/v1/chat/completions", complete)
    with serving(engine) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["input_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_do_not_reach_the_engine(sandbox_url: str, name: str) -> None:
    """SGLang's scheduler dies of a negative id."""
    asked: list[Any] = []
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with plain_engine(asked) as engine, served(engine, sandbox_url, plain=True, vocabulary=120) as url:

        def ask(ids: Any) -> httpx.Response:
            return httpx.post(f"{url}/v1/chat/completions", json={name: ids}, headers=headers, timeout=60)

        for ids in ([-1], [5, 120], ["-1"], [2**70], [[5]], {"0": 1}, 7):
            answer = ask(ids)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                f"{name}: a list of this model's token ids is needed, 0 to 119; use the run's own model"
            )
        assert asked == [] and (ask([0, 119]).status_code, ask(None).status_code) == (200, 200)
        assert httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=headers).status_code == 500
    assert asked == [{name: [0, 119]}, {name: None}]


def test_ids_of_the_engine_are_those_of_the_models_embeddings(tmp_path: Path) -> None:
    """A tokenizer may have fewer."""
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    assert serve.vocabulary_of(tmp_path) == 151936
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 64}}')
    assert serve.vocabulary_of(tmp_path) == 64


def test_seed_that_has_no_effect_is_noted_in_the_answer(address: str) -> None:
    answer = client(address).chat.completions.create(model="agent", messages=QUESTION, seed=3)
    (warning,) = (answer.model_extra or {})["warnings"]
    assert warning.startswith("seed has no effect:")
    chunks = list(client(address).chat.completions.create(model="agent", messages=QUESTION, seed=3, stream=True))
    assert [(chunk.model_extra or {}).get("warnings") for chunk in chunks] == [[warning]] + [None] * (len(chunks) - 1)
    assert "warnings" not in (
        client(address).chat.completions.create(model="agent", messages=QUESTION).model_extra or {}
    )
    body = {"token_ids": CODEC.encode(PROMPT), "prompt_tokens": len(PROMPT), "seed": 3}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(f"{address}/v1/continuations", json=body, headers=headers).json()["warnings"] == [warning]


def test_message_of_text_parts_is_their_text(address: str) -> None:
    parts: Any = [{"type": "text", "text": PROMPT[:3]}, {"type": "text", "text": PROMPT[3:]}]
    answer = client(address).chat.completions.create(model="agent", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == WRITTEN
    image: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content: only text parts can be read"):
        client(address).chat.completions.create(model="agent", messages=[{"role": "user", "content": image}])


def test_model_can_be_asked_for_by_its_id(address: str) -> None:
    assert client(address).models.retrieve("agent").id == "agent"
    with pytest.raises(openai.NotFoundError, match="no model 'others/other' is served here; there is agent"):
        client(address).models.retrieve("others/other")
    with pytest.raises(openai.NotFoundError, match="'code': 'model_not_found'"):
        client(address).chat.completions.create(model="gpt-4", messages=QUESTION)


def test_limit_of_answers_holds_for_requests_that_are_passed_through(sandbox_url: str) -> None:
    asked, release = threading.Event(), threading.Event()

    async def complete(_request: web.Request) -> web.Response:
        asked.set()
        await asyncio.to_thread(release.wait, 60)
        return web.json_response({"choices": []})

    engine = web.Application()
    engine.router.add_post("/v1/chat/completions", complete)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        serving(engine) as port,
        served(f"http://127.0.0.1:{port}", sandbox_url, concurrency=1, plain=True) as url,
        ThreadPoolExecutor(1) as pool,
    ):

        def ask() -> int:
            return httpx.post(f"{url}/v1/chat/completions", json={}, headers=headers, timeout=60).status_code

        first = pool.submit(ask)
        assert asked.wait(30)
        try:
            assert ask() == 429
        finally:
            release.set()
        assert (first.result(), ask()) == (200, 200)
        assert "arpo_serve_running 0\n" in httpx.get(f"{url}/metrics", headers=headers).text


def test_tokens_have_log_probs_and_entropies_if_asked_for(address: str) -> None:
    streamed: list[Any] = []
    for chunk in client(address).chat.completions.create(model="agent", messages=QUESTION, stream=True, logprobs=True):
        found = chunk.choices[0].logprobs
        streamed += (found and found.content) or []
    whole = client(address).chat.completions.create(model="agent", messages=QUESTION, logprobs=True)
    assert whole.choices[0].logprobs is not None
    for tokens in (streamed, whole.choices[0].logprobs.content):
        assert "".join(token.token for token in tokens) == f"{WRITTEN}\0"
        assert {token.logprob for token in tokens} == {-0.5}
        assert [token.entropy for token in tokens] == [1.0 + ord(token.token) / 1000 for token in tokens]


def test_continuations_begin_in_the_middle_of_a_trajectory(address: str) -> None:
    """The first call was made before; of three allowed ones, two are left."""
    before = f"{PROMPT}{PLAN[0]} <result>\n2\n</result>"
    body = {"token_ids": CODEC.encode(before), "prompt_tokens": len(PROMPT), "n": 2}
    body["calls"] = [{"name": "python", "arguments": {"code": "1+1"}}]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{address}/v1/continuations", json=body, headers=headers, timeout=60).json()
    assert (answer["weights"], answer["text"]) == ("export, step 4", before)
    for one in answer["continuations"]:
        call, result, end = one["segments"]
        assert CODEC.decode(call["token_ids"]) == PLAN[1] and call["finish"] == "tool_call"
        assert call["logprobs"] == [-0.5] * len(PLAN[1]) and len(call["entropies"]) == len(PLAN[1])
        assert CODEC.decode(result["token_ids"]) == " <result>\n4\n</result>"
        assert result["tool"]["arguments"] == {"code": "2*2"} and result["tool"]["status"] == "ok"
        assert CODEC.decode(end["token_ids"]) == f"{PLAN[2]}\0" and end["finish"] == "end"
    full = {"token_ids": [*body["token_ids"], *CODEC.encode("." * LIMITS.max_response_tokens)]}
    body["calls"] *= 3
    last = httpx.post(f"{address}/v1/continuations", json=body, headers=headers, timeout=60).json()["continuations"]
    assert [[segment["finish"] for segment in one["segments"]] for one in last] == [["call_limit"]] * 2
    for given, place in (
        ({"n": 17}, "n: "),
        ({"n": 5}, "n: 5 is more than --concurrency 4"),
        ({"token_ids": [CODEC.vocabulary_size]}, "token_ids: "),
        ({"token_ids": [-1]}, "token_ids: "),
        (full, "no room for an answer: "),
    ):
        refused = httpx.post(f"{address}/v1/continuations", json=body | given, headers=headers, timeout=60)
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(place)


def test_second_turn_has_the_results_of_the_first(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(lambda text: planned(*PLAN)(text) if text.count("?") < 2 else "Again."))
    said = iter([PROMPT, "And?", None])
    first, second, last = PLAN

    def prompt(messages: Any) -> str:
        return "".join(message["content"] for message in messages)

    with served(engine.url, sandbox_url, prompt=prompt) as url:
        console = Console(file=io.StringIO(), width=200)
        chat(f"{url}/v1", TOKEN, console=console, read=lambda: next(said))
    seen = CODEC.decode(engine.requests[-1]["input_ids"])
    frames = [f" <result>\n{result}\n</result>" for result in (2, 4)]
    assert seen == f"{PROMPT}{first}{frames[0]}{second}{frames[1]}{last}And?"


def test_chat_shows_text_calls_and_results(address: str) -> None:
    output, said = io.StringIO(), iter([PROMPT, None])
    console = Console(file=output, width=200, highlight=False)
    chat(f"{address}/v1", TOKEN, console=console, read=lambda: next(said))
    shown = output.getvalue()
    assert PLAN[2] in shown and "python ok in" in shown and "  | 2\n" in shown
    with pytest.raises(UserError, match="missing or wrong: set ARPO_SERVE_TOKEN to that of `arpo serve`"):
        chat(f"{address}/v1", "other", console=console, read=lambda: None)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_chat_takes_the_address_with_and_without_v1(address: str, suffix: str) -> None:
    said = iter([PROMPT, None])
    console = Console(file=io.StringIO(), width=200)
    assert chat(f"{address}{suffix}", TOKEN, console=console, read=lambda: next(said))
    assert Grower(f"{address}{suffix}", TOKEN).weights() == "export, step 4"


@pytest.mark.parametrize(("questions", "code"), [(["x" * 2000], 1), (["x" * 2000, PROMPT], 0), ([], 0)])
def test_conversation_in_which_every_question_failed_has_exit_code_1(
    address: str, monkeypatch: pytest.MonkeyPatch, questions: list[str], code: int
) -> None:
    said = iter([*questions, None])
    monkeypatch.setattr("arpo_megatron.serving.chat.from_terminal", lambda: next(said))
    monkeypatch.setenv("ARPO_SERVE_TOKEN", TOKEN)
    assert run_command(["chat", address]) == code


def test_malformed_call_that_ends_an_answer_is_named(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned("So </python>")))
    output, said = io.StringIO(), iter([PROMPT, None])
    with served(engine.url, sandbox_url) as url:
        answer = client(url).chat.completions.create(model="agent", messages=QUESTION)
        (warning,) = (answer.model_extra or {})["warnings"]
        assert warning == "the last tool call was not run: the model wrote no valid call"
        chat(f"{url}/v1", TOKEN, console=Console(file=output, width=200), read=lambda: next(said))
    assert warning in output.getvalue()


def test_chat_colors_text_by_its_entropy(address: str) -> None:
    """The scripted engine's tokens have entropies above 1 nat."""
    output, said = io.StringIO(), iter([PROMPT, None])
    console = Console(file=output, width=200, highlight=False, force_terminal=True, color_system="standard")
    chat(f"{address}/v1", TOKEN, console=console, read=lambda: next(said), show_entropy=True)
    assert "\x1b[31m" in output.getvalue() and output.getvalue().count(" nats per token, at most 1.12]") == len(PLAN)


def test_texts_cannot_control_the_terminal(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned("<python>print(chr(27) + '[2J')</python>", "\x1b]0;title\x07")))
    output, said = io.StringIO(), iter([PROMPT, None])
    with served(engine.url, sandbox_url) as url:
        console = Console(file=output, width=200, highlight=False)
        chat(f"{url}/v1", TOKEN, console=console, read=lambda: next(said))
    shown = output.getvalue()
    assert "  | \\x1b[2J\n" in shown and "\\x1b]0;title" in shown
    assert "\x1b" not in shown and "\x07" not in shown
