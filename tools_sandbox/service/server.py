"""The HTTP surface: POST /call, GET /tools, /health, /metrics, and their description under /docs and /openapi.json."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import socket
import time
from collections import deque
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tools_sandbox.service.deduplication import RequestIdReused
from tools_sandbox.service.dispatch import Call, NoAnswer, ToolService

log = logging.getLogger("tools_sandbox")

_GRACE_S = 1
"""Seconds that answers get to be written after the last call has ended, before their connections are cut."""
_BODY_BYTES = 8 << 20
_PROBLEMS_TOLD = 5
_LOOK_AGAIN_S = 0.01
_ASKED_TO_LEAVE = 16
"""Connections at a time."""
_ACCEPT_AGAIN_S = 0.5
_STATUS = {"queue_full": 429, "queue_time": 429, "stopping": 503, "deadline": 504}


class CallBody(BaseModel):
    """Body of POST /call."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: str = Field(description="Name of the tool; GET /tools lists them.")
    arguments: dict[str, Any] = Field(description="Its arguments.")
    trajectory_id: str = Field(
        default="", max_length=1000, description="Places are shared fairly between these; none of its own: one for all."
    )
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="Seconds the execution may take.")
    request_id: str = Field(
        default="", max_length=128, description="The same in every retry of a call, which is then executed once."
    )
    deadline_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Seconds from now after which nobody waits any more."
    )


class AnswerBody(BaseModel):
    """Answer of POST /call; see `tools_sandbox.answers.ToolAnswer`."""

    text: str
    status: str
    seconds: float
    cached: bool


class _AsciiJson(JSONResponse):
    """JSON with escapes, which can also carry the lone surrogates that a model may write and UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _BodyLimit:
    """Answers 413 to a body that is too large, before it is in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        told = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not told.isdigit() or int(told) > _BODY_BYTES:
            status = 411 if b"transfer-encoding" in headers else 413
            refusal = _AsciiJson({"detail": f"a body of at most {_BODY_BYTES} bytes, with its length"}, status)
            return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)


def build_app(service: ToolService, token: str | None) -> FastAPI:
    """The application. token: what callers must bear, but those of /health and of the interface's own description
    (/docs, /openapi.json); none: everyone may call."""
    app = FastAPI(
        title="tools_sandbox",
        description="Tools for language models: isolated Python, search, browse.",
        default_response_class=_AsciiJson,
        redoc_url=None,
    )
    app.add_middleware(_BodyLimit)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        # Without what was given: it may be what JSON cannot say (NaN), and as long as a body may be.
        problems = [
            {"loc": [str(part)[:100] for part in each["loc"]], "msg": each["msg"], "type": each["type"]}
            for each in error.errors()[:_PROBLEMS_TOLD]
        ]
        return _AsciiJson({"detail": problems}, 422)

    expected = None if token is None else f"Bearer {token}".encode()

    async def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if expected is not None and not hmac.compare_digest(given, expected):
            raise HTTPException(401, "missing or wrong bearer token", {"WWW-Authenticate": "Bearer"})

    @app.post("/call", dependencies=[Depends(authorised)], response_model=AnswerBody)
    async def call(body: CallBody, request: Request) -> Response:
        """Run a tool. 429 and 503 carry Retry-After: ask again, with the same request id."""
        deadline = math.inf if body.deadline_s is None else time.monotonic() + body.deadline_s
        asked = Call(body.tool, body.arguments, body.trajectory_id, body.timeout_s, body.request_id, deadline)
        try:
            answer = await _unless_gone(service, asked, request)
        except NoAnswer as error:
            after = {} if error.reason == "deadline" else {"Retry-After": str(error.retry_after_s)}
            raise HTTPException(_STATUS[error.reason], str(error), after) from error
        except RequestIdReused as error:
            raise HTTPException(409, str(error)) from error
        return answer

    @app.get("/tools", dependencies=[Depends(authorised)])
    async def tools() -> list[dict[str, object]]:
        """The tools, with the JSON schema of their arguments."""
        return [
            {"name": tool.name, "description": tool.description, "arguments": tool.schema()}
            for tool in service.tools.values()
        ]

    @app.get("/health")
    async def health() -> dict[str, object]:
        """State and counts since the start."""
        return service.health()

    @app.get("/metrics", dependencies=[Depends(authorised)])
    async def metrics() -> Response:
        """The same for Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _unless_gone(service: ToolService, asked: Call, request: Request) -> Response:
    """The answer; if the caller goes away first, the call is cancelled."""
    call = asyncio.ensure_future(service.call(asked))
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            return Response(status_code=499)  # nobody reads it
        return _AsciiJson(call.result().to_dict())
    finally:
        call.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class Server(uvicorn.Server):
    """uvicorn that says when it serves, drains when it is told to stop, and bounds its connections.

    connections: that may be open at a time. Further callers wait in the kernel's queue, while the oldest connections
    make room: idle ones at once, others when their call is answered.
    """

    def __init__(self, app: FastAPI, service: ToolService, ready_line: str, connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                log_config=None,
                log_level="warning",
                access_log=False,
                # Longer than a trainer step usually leaves a connection idle.
                timeout_keep_alive=300,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._service = service
        self._ready_line = ready_line
        self._connections = connections
        self._admitted: deque[Any] = deque()
        """Protocols of connections, oldest first; also of some that have ended."""
        self._doors: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the ready line once tools can be called."""
        try:
            await self._service.start()
            # None of uvicorn's own: asyncio's servers accept what comes until no descriptor is left for a call.
            await super().startup([])
        except BaseException:
            await self._service.stop()
            raise
        if self.started:
            self._doors = [asyncio.create_task(self._admit(listener)) for listener in sockets or []]
            print(self._ready_line, flush=True)

    async def _admit(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        failures = 0
        while True:
            while len(self.server_state.connections) >= self._connections:
                self._ask_to_leave()
                await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                connection, _ = await loop.sock_accept(listener)
                _, protocol = await loop.connect_accepted_socket(self._protocol, connection)
            except OSError as error:
                failures += 1
                # At the 1st, 2nd, 4th, 8th: whoever takes all descriptors must not fill the log too.
                if failures & (failures - 1) == 0:
                    log.warning("a connection cannot be accepted (error %d): %s", failures, error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            self._admitted.append(protocol)
            if len(self._admitted) > 2 * self._connections:
                self._admitted = deque(each for each in self._admitted if each in self.server_state.connections)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's protocols
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _ask_to_leave(self) -> None:
        for _ in range(min(_ASKED_TO_LEAVE, len(self._admitted))):
            oldest = self._admitted.popleft()
            if oldest in self.server_state.connections:
                oldest.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the calls in flight finish, end those that take too long, then cut the connections."""
        await self._service.drain()
        await self._service.stop()
        for door in self._doors:
            door.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal changes nothing: the end is already bounded in time."""
        self.should_exit = True
