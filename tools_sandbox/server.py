"""The HTTP surface: POST /call, GET /tools, GET /health."""

from __future__ import annotations

import hmac
import json
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tools_sandbox.service import Overloaded, ToolService

_GRACE_S = 1
"""Seconds that calls in flight get to answer after SIGTERM, before their connections are cut."""


class CallBody(BaseModel):
    """Body of POST /call."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: str
    arguments: dict[str, Any]
    trajectory_id: str = ""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class _AsciiJson(JSONResponse):
    """JSON with escapes, which can also carry the lone surrogates that a model may write and UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def build_app(service: ToolService, token: str | None) -> FastAPI:
    """The application. token: what callers of /call and /tools must bear; none: everyone may call."""
    app = FastAPI(title="tools_sandbox", default_response_class=_AsciiJson, docs_url=None, redoc_url=None)
    expected = None if token is None else f"Bearer {token}".encode()

    async def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if expected is not None and not hmac.compare_digest(given, expected):
            raise HTTPException(401, "missing or wrong bearer token", {"WWW-Authenticate": "Bearer"})

    @app.post("/call", dependencies=[Depends(authorised)])
    async def call(body: CallBody) -> _AsciiJson:
        try:
            answer = await service.call(body.tool, body.arguments, body.trajectory_id, body.timeout_s)
        except Overloaded as error:
            raise HTTPException(503, str(error)) from error
        return _AsciiJson(answer.to_dict())

    @app.get("/tools", dependencies=[Depends(authorised)])
    async def tools() -> list[dict[str, object]]:
        return [
            {"name": tool.name, "description": tool.description, "arguments": tool.arguments.model_json_schema()}
            for tool in service.tools.values()
        ]

    @app.get("/health")
    async def health() -> dict[str, object]:
        return service.health()

    return app


class Server(uvicorn.Server):
    """uvicorn that says when it serves, and ends the calls in flight when it is told to stop."""

    def __init__(self, app: FastAPI, service: ToolService, ready_line: str) -> None:
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the ready line once connections are accepted."""
        await super().startup(sockets)
        if self.started:
            print(self._ready_line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the calls in flight first, so that nobody has to wait for them."""
        self._service.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal changes nothing: the end is already bounded in time."""
        self.should_exit = True
