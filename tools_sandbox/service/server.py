"""The HTTP interface: POST /call, GET /tools, /health, /metrics, and its description under /docs and /openapi.json."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections import deque
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.types import Message, Receive

from tools_sandbox.config import TOKEN_VARIABLE
from tools_sandbox.service.connection import Connection
from tools_sandbox.service.deduplication import RequestIdReused
from tools_sandbox.service.dispatch import Call, NoAnswer, ToolService
from tools_sandbox.service.intake import Intake
from tools_sandbox.utils.logs import is_logged

log = logging.getLogger("tools_sandbox")

_GRACE_S = 1
"""Seconds after the last call has ended until connections are cut, so that its answer can be sent."""
_MAX_PROBLEMS = 5
_MAX_KEYS = 1000
_FULL_POLL_S = 0.01
_SHUTDOWNS_PER_POLL = 16
"""Connections that are asked to close at a time while the service is full."""
_CLOSED_KEPT = 16
"""Closed connections, with the headers of their requests, that may stay in memory."""
_ACCEPT_RETRY_S = 0.5
_STATUS = {"queue_full": 429, "queue_time": 429, "stopping": 503, "deadline": 504}


class CallBody(BaseModel):
    """Body of POST /call: a tool, its arguments and the limits of the call."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: str = Field(description="Name of the tool; GET /tools lists them.")
    arguments: dict[str, Any] = Field(description="Its arguments.")
    trajectory_id: str = Field(
        default="", max_length=1000, description="Slots are shared fairly between trajectories; empty counts as one."
    )
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="Seconds the execution may take.")
    request_id: str = Field(
        default="", max_length=128, description="The same in every retry of a call, which is then executed once."
    )
    deadline_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Seconds from now until the caller stops waiting."
    )

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, values: Any) -> Any:
        # Each unknown key is an error of its own: a body with very many would keep the event loop busy for seconds.
        if isinstance(values, dict) and len(values) > _MAX_KEYS:
            raise ValueError(f"more than {_MAX_KEYS} keys")
        return values


class AnswerBody(BaseModel):
    """Response of POST /call; see `tools_sandbox.answers.ToolAnswer`."""

    text: str
    status: str
    seconds: float
    cached: bool
    failure: str = "none"


class _AsciiJson(JSONResponse):
    """JSON in ASCII. Escapes can also carry lone surrogates, which a model may write and UTF-8 cannot represent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def build_app(service: ToolService, token: str | None) -> FastAPI:
    """Return the application. token: see `Intake`."""
    app = FastAPI(
        title="tools_sandbox",
        description="Tools for language models: isolated Python, search, browse.",
        default_response_class=_AsciiJson,
        redoc_url=None,
        exception_handlers={RequestValidationError: _answer_malformed},
    )
    app.add_middleware(Intake, token=token)

    @app.post("/call", response_model=AnswerBody)
    async def call(body: CallBody, request: Request) -> Response:
        """Run a tool. After 429 and 503 repeat the call with the same request id; Retry-After has the seconds."""
        deadline = math.inf if body.deadline_s is None else time.monotonic() + body.deadline_s
        requested = Call(body.tool, body.arguments, body.trajectory_id, body.timeout_s, body.request_id, deadline)
        try:
            answer = await _call_until_disconnect(service, requested, request)
        except NoAnswer as error:
            after = {} if error.reason == "deadline" else {"Retry-After": str(error.retry_after_s)}
            raise HTTPException(_STATUS[error.reason], str(error), after) from error
        except RequestIdReused as error:
            raise HTTPException(409, str(error)) from error
        return answer

    @app.get("/tools")
    async def tools() -> list[dict[str, object]]:
        """Return the tools with the JSON schemas of their arguments, and whether equal calls share an answer."""
        return [
            {
                "name": tool.name,
                "description": tool.description,
                "arguments": tool.schema(),
                "cacheable": tool.cacheable,
            }
            for tool in service.tools.values()
        ]

    @app.get("/health")
    async def health() -> dict[str, object]:
        """Return the state of the service and its counts since the start."""
        return service.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in the text format of Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _answer_malformed(_: Request, error: RequestValidationError) -> Response:
    # Without the input: it may hold what JSON cannot represent (NaN), and be as long as a body.
    problems = [
        {"loc": [str(part)[:100] for part in each["loc"]], "msg": each["msg"], "type": each["type"]}
        for each in error.errors()[:_MAX_PROBLEMS]
    ]
    return _AsciiJson({"detail": problems}, 422)


async def _call_until_disconnect(service: ToolService, requested: Call, request: Request) -> Response:
    """Return the answer. If the caller disconnects first, cancel the call."""
    call = asyncio.ensure_future(service.call(requested))
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            return Response(status_code=499)  # no one reads it
        return _AsciiJson(call.result().to_dict())
    finally:
        call.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class Server(uvicorn.Server):
    """A uvicorn server that prints a ready line, drains calls before it stops, and bounds its connections.

    connections: number that may be open at a time. Further callers wait in the kernel's queue while the oldest
    connections are closed: at once if they are idle or their request is incomplete, else when their call has been
    answered. needs_token: whether callers need one; if not, the log reports it.
    """

    def __init__(
        self, app: FastAPI, service: ToolService, ready_line: str, connections: int, *, needs_token: bool
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                # It bounds size and time of headers. No WebSockets: their connections would not be counted.
                http=Connection,
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                # Longer than a trainer's step usually leaves a connection idle.
                timeout_keep_alive=300,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._service = service
        self._ready_line = ready_line
        self._connections = connections
        self._needs_token = needs_token
        self._admitted: deque[Any] = deque()
        """Protocols of connections, oldest first, including some that have ended."""
        self._acceptors: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the service and print the ready line once tools can be called."""
        try:
            await self._service.start()
            # Without sockets: asyncio's own servers would accept connections until no descriptor is left for a call.
            await super().startup([])
        except BaseException:
            await self._service.stop()
            raise
        if self.started:
            self._acceptors = [asyncio.create_task(self._accept(listener)) for listener in sockets or []]
            if not self._needs_token:
                log.warning("no token (%s): every process of this machine may call", TOKEN_VARIABLE)
            print(self._ready_line, flush=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        failures = 0
        while True:
            while len(self.server_state.connections) >= self._connections:
                self._close_oldest()
                await asyncio.sleep(_FULL_POLL_S)
            try:
                connection, _ = await loop.sock_accept(listener)
                _, protocol = await loop.connect_accepted_socket(self._protocol, connection)
            except OSError as error:
                failures += 1
                if is_logged(failures):  # a lack of descriptors must not flood the log
                    log.warning("a connection cannot be accepted (error %d): %s", failures, error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            self._admitted.append(protocol)
            if len(self._admitted) > 2 * len(self.server_state.connections) + _CLOSED_KEPT:
                self._admitted = deque(each for each in self._admitted if each in self.server_state.connections)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's protocols
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _close_oldest(self) -> None:
        for _ in range(min(_SHUTDOWNS_PER_POLL, len(self._admitted))):
            oldest = self._admitted.popleft()
            if oldest in self.server_state.connections:
                request = oldest.cycle
                if request is not None and request.more_body and not request.response_complete:
                    oldest.transport.abort()
                else:
                    oldest.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let calls in flight finish, cancel those that take too long, then cut the connections."""
        await self._service.drain()
        await self._service.stop()
        for acceptor in self._acceptors:
            acceptor.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown. A second signal changes nothing, since the shutdown is bounded in time."""
        self.should_exit = True
