"""The web server of `arpo view`: the page and its data, on loopback unless another host is chosen.

It changes nothing of a run. With an agent (`--grow`), the page may ask for continuations of a branch.

Three rules keep others out. The `Host` header must be an address or a name of this machine, so that no web site can
reach the server through a name of its own (DNS rebinding). With a token, a request needs it as a cookie, which the
printed address sets, or as a bearer token. The content security policy allows only the server's own files.
"""

import errno
import hashlib
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from functools import partial

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arpo_megatron.errors import UserError
from arpo_megatron.utils.own_names import is_own_name, is_same_origin
from arpo_megatron.utils.signals import Interrupted, interrupts_call
from arpo_megatron.utils.web_server import CommandServer
from arpo_megatron.view.pages import Pages, to_json
from arpo_megatron.view.static_files import static_file
from tools_sandbox.utils.logs import limit_uvicorn

DEFAULT_PORT = 8750
_OWN_HOSTS = "use 127.0.0.1, or 0.0.0.0 for all of its own"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def application(pages: Pages, token: str | None, host: str) -> Starlette:
    """Return the web application.

    Args:
        pages: answers the requests for data.
        token: what a request must present; None: nothing.
        host: the address that the server listens on; also a name that requests may use.
    """

    def page(request: Request) -> Response:
        if token is not None and "token" in request.query_params:  # checked by the guard
            response: Response = RedirectResponse("/", 303)
            response.set_cookie(cookie_name(request), token, httponly=True, samesite="strict")
            return response
        return _file("index.html")

    def file(request: Request) -> Response:
        return _file(request.path_params["name"])

    def data(request: Request) -> Response:
        path = request.path_params["address"]
        address = path.split("/") if path else []
        try:
            body, status = to_json(pages.answer(*address)), 200
        except UserError as error:
            body, status = to_json({"error": str(error)}), 404
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status == 200 and request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, status, {"ETag": tag, "Cache-Control": "no-cache"}, "application/json")

    async def grow(request: Request) -> Response:
        # A form of another site cannot have this content type, and its scripts would have to ask for leave first.
        headers = request.headers
        same = is_same_origin(headers.get("origin"), headers.get("host"))
        if headers.get("content-type") != "application/json" or not same:
            return Response(to_json({"error": "only the page itself may grow branches"}), 403)
        name, step, number = (request.path_params[part] for part in ("run", "step", "number"))
        try:
            wanted = Growing.model_validate_json(await _body(request))
            work = partial(pages.grow, name, step, number, segment=wanted.segment, count=wanted.count)
            return Response(to_json(await run_in_threadpool(work)), media_type="application/json")
        except ValidationError as error:
            return Response(to_json({"error": f"the body is not that of the page: {error.errors()[0]['msg']}"}), 400)
        except UserError as error:
            return Response(to_json({"error": str(error)}), 400)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/data/{run}/trees/{step}/{number:int}/grow", grow, methods=["POST"]),
            Route("/data/{address:path}", data),
            Route("/{name}", file),
        ],
        middleware=[Middleware(_Guard, token=token, host=host), Middleware(GZipMiddleware, minimum_size=4096)],
    )


class Growing(BaseModel):
    """The body of a request to grow a branch again."""

    segment: int
    count: int


async def _body(request: Request) -> bytes:
    """Return the first KiB of the body; more is no valid request."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > 1024:
            break
    return body[:1024]


def _file(name: str) -> Response:
    found = static_file(name)
    if found is None:
        return PlainTextResponse("there is no such page", 404)
    return Response(found[0], headers={"Cache-Control": "no-cache"}, media_type=found[1])


@dataclass(frozen=True, slots=True)
class _Guard:
    """Refuses requests to other names and requests without the token, and adds the security headers."""

    app: ASGIApp
    token: str | None
    host: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        answer = self.app if refusal is None else refusal
        return await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not is_own_name(request.headers.get("host", ""), self.host):
            return PlainTextResponse("this server answers only to the address that arpo view printed", 421)
        if self.token is not None and not _has_token(request, self.token):
            return PlainTextResponse("the token is missing or wrong: open the address that arpo view printed", 401)
        return None


def cookie_name(request: Request) -> str:
    """Return the name of the token's cookie. It has the port, because browsers share cookies among a host's ports."""
    return f"arpo_view_{request.url.port or 80}"


def _has_token(request: Request, token: str) -> bool:
    given = [
        request.cookies.get(cookie_name(request), ""),
        request.headers.get("authorization", "").removeprefix("Bearer "),
    ]
    if request.url.path == "/":
        given.append(request.query_params.get("token", ""))
    return any(hmac.compare_digest(each.encode(), token.encode()) for each in given)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket.

    Args:
        host: address to listen on.
        port: 0 for any free port; None for `DEFAULT_PORT`, or any free one if it is taken.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise UserError(f"--host {host}: no machine is known by this name; {_OWN_HOSTS}") from None
    wanted = DEFAULT_PORT if port is None else port
    try:
        return socket.create_server((host, wanted), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port is None:
            return listen(host, 0)
        raise UserError(_refusal(error, host, wanted)) from None


def address_of(host: str, listening: socket.socket) -> str:
    """Return the address at which a browser finds a listening socket: the machine's name if it has all addresses."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104  not bound here
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


def _refusal(error: OSError, host: str, port: int) -> str:
    """Return what is wrong with an address, and how to fix it."""
    match error.errno:
        case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
            return f"--host {host}: this machine has no such address; {_OWN_HOSTS}"
        case errno.EADDRINUSE:
            return f"port {port} is in use on {host}: choose another --port, 0 for any free one"
        case errno.EACCES:
            return f"port {port} is reserved for the administrator: choose a --port from 1024"
    return f"cannot listen on {host}, port {port}: {error.strerror}; choose another --host or --port"


def serve(pages: Pages, *, host: str, port: int | None, with_token: bool) -> None:
    """Print the page's address and serve it until a signal ends the command.

    Args:
        pages: answers the requests for data.
        host: address to listen on; one that others can reach always has a token.
        port: see `listen`.
        with_token: ask for a token on loopback, too.

    Raises:
        UserError: the address cannot be used.
        Interrupted: a signal ended the server.
    """
    token = secrets.token_urlsafe(24) if with_token or not is_loopback(host) else None
    with listen(host, port) as listening:
        suffix = "" if token is None else f"?token={token}"
        print(f"{address_of(host, listening)}/{suffix}", flush=True)
        config = uvicorn.Config(application(pages, token, host), log_level="warning", access_log=False, lifespan="off")
        limit_uvicorn()
        server, ended = CommandServer(config), list[bool]()

        def end() -> None:
            ended.append(True)
            server.end()

        with interrupts_call(end):
            server.run(sockets=[listening])
    if ended:
        raise Interrupted
