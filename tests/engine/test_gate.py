"""Two trainers that push to one engine, which a cluster's requeue can bring about: only the later push is taken."""

import json
import socket
from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.server import gate

PATH = "update_weights_from_disk"


async def sglang(_scope: Any, _receive: Any, send: Any) -> None:
    """Stands for SGLang's server, which answers every request."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({}).encode()})


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with the gate and without an engine."""

    async def done(**_: Any) -> Any:
        return SimpleNamespace(success=True)

    arguments = SimpleNamespace(tp_size=1, weight_version="0")
    manager = SimpleNamespace(freeze_gc=done, flush_cache=done, server_args=arguments)
    monkeypatch.setattr(gate, "_manager", lambda: manager)
    server = uvicorn.Server(uvicorn.Config(gate.PushGate(sglang), lifespan="off", log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def load(admin: EngineAdmin) -> None:
    admin.post_all(PATH, [(admin.urls[0], {})])[0].result()


@pytest.mark.parametrize("later", [17, 18])
def test_weights_and_commit_of_an_earlier_push_are_refused(url: str, later: int) -> None:
    first, second = EngineAdmin([url], 30.0), EngineAdmin([url], 30.0)
    first.begin_push(17)
    load(first)
    second.begin_push(later)
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*another push has begun meanwhile"):
        load(first)
    load(second)
    with pytest.raises(WeightPushError, match=rf"HTTP 409: .*version {later} are arriving, from another"):
        first.commit_push(17, 1)
    second.commit_push(later, 1)
    with pytest.raises(WeightPushError, match=r"HTTP 409: .*no push has begun"):
        load(first)
