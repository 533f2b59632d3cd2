"""A server that speaks OpenAI's chat format and answers by a script.

A real model cannot be made to answer a given question correctly or to fail at a given request. test_agents.py sends the
same requests to a real SGLang.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ChatServer:
    """Answers POST /v1/chat/completions."""

    script: Callable[[list[dict[str, str]]], str]
    """Messages of a request to the model's text, before it is cut at stop strings."""
    delay_s: float = 0.0
    """Time of an answer."""
    fail: Callable[[list[dict[str, str]]], int] = lambda _messages: 0
    """Messages of a request to the error status; 0 for success."""
    error_body: str = ""
    """Body of a failed request; empty for an error in OpenAI's format."""
    unknown: str = ""
    """Parameter that the server rejects with 400."""
    body: Callable[[list[dict[str, str]]], bytes | None] = lambda _messages: None
    """Messages of a request to the raw body; None for a completion of the script."""
    holds_after: float = float("inf")
    """Number of requests that are answered; later ones wait until it is raised."""
    waits_for: int = 0
    """Number of requests that must be in flight at the same time before the first is answered."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _now: int = 0

    def asked(self) -> list[str]:
        """Return the questions of all requests except the probe."""
        users = [next(m["content"] for m in each["messages"] if m["role"] == "user") for each in self.requests]
        return [text for text in users if text != "1+1="]

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        number = len(self.requests)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self.delay_s)
            while number > self.holds_after or self.most_at_once < self.waits_for:
                await asyncio.sleep(0.01)
            if self.unknown and self.unknown in body:
                error = {"error": {"message": f"Unrecognized request argument supplied: {self.unknown}"}}
                return web.json_response(error, status=400)
            if status := self.fail(body["messages"]):
                error = {"error": {"message": f"status {status} was wanted"}}
                return web.json_response(self.error_body or error, status=status)
            if (raw := self.body(body["messages"])) is not None:
                return web.Response(body=raw, content_type="application/json")
            text, reason = self.script(body["messages"]), "stop"
            cuts = [text.find(stop) for stop in body.get("stop") or () if stop in text]
            text = text[: min(cuts)] if cuts else text
            if len(text.split()) > body["max_tokens"]:
                text, reason = " ".join(text.split()[: body["max_tokens"]]), "length"
            tokens = len(text.split())
            prompt = sum(len(message["content"].split()) for message in body["messages"])
            return web.json_response(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [
                        {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
                    ],
                    "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
                }
            )
        finally:
            self._now -= 1

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})


@contextmanager
def served(server: ChatServer) -> Iterator[ChatServer]:
    """Serve from a thread with its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
