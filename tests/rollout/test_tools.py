"""Tool calls survive a killed service and HTTP errors; a call that keeps failing raises an error."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from transformers import PreTrainedTokenizerFast

from arpo_megatron.models.tiny import generated_tokenizer, train_bpe
from arpo_megatron.rollout.tools import ToolBlockedError, ToolClient, service_of
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.tags.calls import RESULT_FRAME
from arpo_megatron.utils.ports import free_ports
from tests.engine.scripted import CharacterCodec
from tools_sandbox.client import SandboxUnavailable, ToolAnswer

SLOW = "import time; time.sleep({}); 6 * 7"


@pytest.fixture
def port() -> Iterator[int]:
    (port,) = free_ports(1)
    yield port


def start(port: int, folder: Path, *, sessions: bool = False) -> "subprocess.Popen[str]":
    """Start a real tool service at `port` and wait until it serves."""
    kept = f", session_dir: {folder / 'states'}" if sessions else ""
    (folder / "config.yaml").write_text(f"python: {{preload: []{kept}}}\n")
    command = [sys.executable, "-m", "tools_sandbox", "--port", str(port), "--config", str(folder / "config.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready ")
    process.stdout.close()
    return process


def ask(
    client: ToolClient, code: str, on_retry: Callable[[], None] = lambda: None, **session: str
) -> "asyncio.Task[ToolAnswer]":
    return asyncio.create_task(
        client.call("python", {"code": code, **session}, trajectory_id="t", timeout_s=10.0, on_retry=on_retry)
    )


def ask_service(answer: Callable[[web.Request], Awaitable[web.Response]], retry_for_s: float) -> ToolAnswer:
    """Send one call to a service whose calls are answered by `answer`."""

    async def run() -> ToolAnswer:
        app = web.Application()
        app.router.add_post("/call", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with ToolClient(f"http://127.0.0.1:{runner.addresses[0][1]}", retry_for_s=retry_for_s) as client:
                return await ask(client, "1")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [(signal.SIGKILL, 1), (signal.SIGTERM, 3)],  # longer than a stopping service lets calls finish
)
def test_calls_survive_a_restart_of_the_service(port: int, fault: signal.Signals, seconds: int, tmp_path: Path) -> None:
    service = start(port, tmp_path)

    async def run() -> list[ToolAnswer]:
        nonlocal service
        async with ToolClient(f"http://127.0.0.1:{port}", retry_for_s=300) as client:
            repeated: list[None] = []
            calls = [ask(client, SLOW.format(seconds), lambda: repeated.append(None)) for _ in range(8)]
            await asyncio.sleep(0.5)
            service.send_signal(fault)
            await asyncio.to_thread(service.wait)
            await asyncio.sleep(3)  # longer than the service's own client waits
            service = await asyncio.to_thread(start, port, tmp_path)
            answers = await asyncio.gather(*calls)
            assert repeated
            return answers

    try:
        assert [(answer.text, answer.status) for answer in asyncio.run(run())] == [("42", "ok")] * 8
    finally:
        service.kill()
        service.wait()


def test_session_call_can_be_repeated_after_a_restart(port: int, tmp_path: Path) -> None:
    """Its state has a name that follows from its path, and a repetition starts from the state before it."""
    state, more = "n = 1", "import time; time.sleep(1); n += 1; n"
    service = start(port, tmp_path, sessions=True)

    async def run() -> list[str]:
        nonlocal service
        async with ToolClient(f"http://127.0.0.1:{port}", retry_for_s=300) as client:
            await ask(client, state, state="", keep="a")
            call = ask(client, more, state="a", keep="b")
            await asyncio.sleep(0.5)
            service.send_signal(signal.SIGKILL)
            await asyncio.to_thread(service.wait)
            service = await asyncio.to_thread(start, port, tmp_path, sessions=True)
            first = await call
            again = await ask(client, more, state="a", keep="b")  # as if the first answer had been lost
            after = await ask(client, "n", state="b", keep="c")
            return [first.text, again.text, after.text]

    try:
        assert asyncio.run(run()) == ["2", "2", "2"]
    finally:
        service.kill()
        service.wait()


def test_unreachable_service_fails_the_call(port: int) -> None:
    async def run() -> None:
        async with ToolClient(f"http://127.0.0.1:{port}", retry_for_s=1) as client:
            await ask(client, "1")

    started = time.monotonic()
    with pytest.raises(SandboxUnavailable):
        asyncio.run(run())
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([500] * 4, ("fine", "ok")),
        ([503] * 7, ("fine", "ok")),
        ([503] * 4 + [500], ("fine", "ok")),  # a restart and one mishap: not a lasting failure
    ],
)
def test_http_errors_are_retried(failures: list[int], expected: tuple[str, str]) -> None:
    left = list(failures)

    async def answer(_request: web.Request) -> web.Response:
        if left:
            return web.Response(status=left.pop(0), text="oh")
        return web.json_response({"text": "fine", "status": "ok", "seconds": 0.1, "cached": False})

    got = ask_service(answer, retry_for_s=300)
    assert (got.text, got.status) == expected


def test_lasting_http_errors_fail_the_call() -> None:
    asked = 0

    async def answer(_request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=500, text="oh")

    with pytest.raises(SandboxUnavailable, match="HTTP 500"):
        ask_service(answer, retry_for_s=1)
    assert asked > 5, "the call is repeated after the service's client has given up"


@pytest.mark.parametrize(("failure", "repeated"), [("temporary", True), ("lasting", False), ("blocked", False)])
def test_failure_of_a_provider_is_no_answer(failure: str, repeated: bool) -> None:
    ids = []

    async def answer(request: web.Request) -> web.Response:
        ids.append((await request.json())["request_id"])
        failed = {"text": "HTTP 503", "status": "error", "seconds": 0.1, "cached": False, "failure": failure}
        return web.json_response(failed)

    with pytest.raises(ToolBlockedError if failure == "blocked" else SandboxUnavailable, match="HTTP 503"):
        ask_service(answer, retry_for_s=1)
    assert len(ids) == len(set(ids))  # the service would repeat its answer to a known id
    assert (len(ids) > 1) == repeated


@pytest.mark.parametrize("tokenizer", [generated_tokenizer(), train_bpe(["some text to learn from"] * 9, 400)])
def test_special_token_in_a_page_becomes_ordinary_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    codec = TokenizerCodec(tmp_path)
    page = f"a{tokenizer.eos_token}{tokenizer.pad_token} b"
    special = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert special <= set(codec.encode(page))  # as the text of a prompt
    ids = RESULT_FRAME.tokens(page, codec, 500)
    assert not special & set(ids)
    assert codec.decode(ids) == RESULT_FRAME.text(page)
    assert codec.encode("</result>") == ids[-1:]


def test_large_result_is_cut_before_tokenization() -> None:
    encoded = 0

    class Counting(CharacterCodec):
        def encode_plain(self, text: str) -> list[int]:
            nonlocal encoded
            encoded += len(text)
            return self.encode(text)

    codec = Counting()

    answer = "".join(f"line {number}\n" for number in range(850_000))
    assert len(answer) > 10_000_000
    ids = RESULT_FRAME.tokens(answer, codec, 500)
    assert len(ids) == 500
    empty = RESULT_FRAME.text("")
    middle = len(empty) - len("\n</result>")
    assert codec.decode(ids) == RESULT_FRAME.text(answer[: 500 - len(empty)])
    assert codec.decode(ids)[middle:].startswith("line 0\nline 1\n")
    assert encoded < 100_000


async def counting_server(asked: set[str], port: int = 0) -> web.AppRunner:
    """Serve calls at a port, and add the trajectory of each to `asked`."""

    async def answer(request: web.Request) -> web.Response:
        asked.add((await request.json())["trajectory_id"])
        return web.json_response({"text": "1", "status": "ok", "seconds": 0.0, "cached": False})

    async def tools(_request: web.Request) -> web.Response:
        return web.json_response([{"name": "python", "description": "", "arguments": {}}])

    app = web.Application()
    app.router.add_post("/call", answer)
    app.router.add_get("/tools", tools)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def test_calls_of_a_task_go_to_one_of_several_services() -> None:
    """Two servers that count calls; the calls of a tree's paths share the service of their task."""
    asked: list[set[str]] = [set(), set()]

    async def run() -> None:
        runners = [await counting_server(each) for each in asked]
        try:
            urls = " ".join(f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
            async with ToolClient(urls) as client:
                for task in range(20):
                    for path in ("0", "0/1"):
                        await client.call("python", {"code": "1"}, trajectory_id=f"q{task}/{path}", timeout_s=5.0)
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(run())
    tasks = [{each.partition("/")[0] for each in one} for one in asked]
    assert len(tasks[0] & tasks[1]) == 0 and min(map(len, tasks)) >= 4
    assert [len(one) for one in asked] == [2 * len(each) for each in tasks]
    assert tasks[1] == {f"q{number}" for number in range(20) if service_of(f"q{number}/0", 2) == 1}


def test_tasks_of_a_resting_service_are_divided_among_the_others() -> None:
    tasks = [f"q{number}/0" for number in range(300)]
    own = [service_of(task, 4) for task in tasks]
    now = [service_of(task, 4, {1, 2}) for task in tasks]
    assert all(after == before for before, after in zip(own, now, strict=True) if before in (0, 3))
    moved = [after for before, after in zip(own, now, strict=True) if before in (1, 2)]
    assert set(moved) == {0, 3} and 50 < moved.count(0) < 100
    assert [service_of(task, 4, range(4)) for task in tasks] == own, "if all rest, each is tried again"


def test_calls_go_to_another_service_until_theirs_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.rollout.tools._REST_S", 5.0)
    tasks = [f"q{number}" for number in range(20) if service_of(f"q{number}", 2) == 0]
    asked: list[set[str]] = [set(), set()]
    repeated: list[str] = []
    ports = free_ports(2)

    async def run() -> None:
        second = await counting_server(asked[1], ports[1])
        async with ToolClient(" ".join(f"http://127.0.0.1:{port}" for port in ports)) as client:

            async def call(task: str) -> None:
                await client.call(
                    "python", {}, trajectory_id=task, timeout_s=5.0, on_retry=lambda: repeated.append(task)
                )

            assert [tool.name for tool in await client.select(["python"])] == ["python"]
            await call(tasks[0])
            assert repeated == tasks[:1]
            await asyncio.gather(*map(call, tasks))
            assert repeated == tasks[:1], "a call waited for a service that is known to be down"
            assert asked == [set(), set(tasks)]
            first = await counting_server(asked[0], ports[0])
            await asyncio.sleep(5.0)
            await call(tasks[0])
            await asyncio.gather(*map(call, tasks))
            assert asked[0] == set(tasks) and repeated == tasks[:1]
            await first.cleanup()
        await second.cleanup()

    asyncio.run(run())
