"""A hostile web site on two loopback addresses: tests permit one of them and forbid the other."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.tools_sandbox.helpers.served import serving

PERMITTED = "127.0.0.2"
FORBIDDEN = "127.0.0.1"
SECRET = "the secret of the inner network"
ARTICLE = "<p>" + "The town of Qzlf has 417 inhabitants and a bridge. " * 20 + "</p>"
HTML = f"<html><head><title>Qzlf &amp; Co</title></head><body><nav>menu</nav><article>{ARTICLE}</article></body></html>"
BOMB_BYTES = 200_000_000


class Site:
    """A running site: its port and the requests that it received."""

    def __init__(self) -> None:
        self.port = 0
        self.requested: list[str] = []
        self.sent_bytes = 0

    def url(self, path: str, host: str = PERMITTED) -> str:
        return f"http://{host}:{self.port}{path}"


async def _stream(request: web.Request, chunk: bytes, *, pause_s: float, headers: dict[str, str]) -> web.StreamResponse:
    """Send a body without end."""
    reply = web.StreamResponse(headers=headers)
    await reply.prepare(request)
    while True:
        await reply.write(chunk)
        request.app[SITE].sent_bytes += len(chunk)
        await asyncio.sleep(pause_s)


SITE = web.AppKey("site", Site)


def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(1_000_000)) for _ in range(BOMB_BYTES // 1_000_000)) + packer.flush()


def _application(site: Site) -> web.Application:
    bomb = _bomb()
    bomb_of_bombs = gzip.compress(bomb)

    async def serve(request: web.Request) -> web.StreamResponse:
        path = request.path
        site.requested.append(path)
        html = {"Content-Type": "text/html"}
        match path.strip("/").split("/"):
            case ["page"]:
                return web.Response(text=HTML, content_type="text/html")
            case ["emoji"]:
                return web.Response(text="\U0001f600" * 100_000)
            case ["secret"]:
                return web.Response(text=SECRET)
            case ["loop"]:
                raise web.HTTPFound("/loop")
            case ["chain", count]:
                raise web.HTTPFound("/page" if count == "1" else f"/chain/{int(count) - 1}")
            case ["to", "inside"]:
                raise web.HTTPFound(site.url("/secret", FORBIDDEN))
            case ["to", "file"]:
                return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
            case ["to", "nonsense"]:
                return web.Response(status=302, headers={"Location": "http://[::1"})
            case ["bomb"]:
                return web.Response(body=bomb, headers=html | {"Content-Encoding": "gzip"})
            case ["bomb-of-bombs"]:
                return web.Response(body=bomb_of_bombs, headers=html | {"Content-Encoding": "gzip"})
            case ["twice-packed"]:
                return web.Response(body=bomb, headers=html | {"Content-Encoding": "gzip, gzip"})
            case ["not-packed"]:
                return web.Response(body=b"no gzip at all", headers=html | {"Content-Encoding": "gzip"})
            case ["packed-and-cut"]:
                return web.Response(
                    body=gzip.compress(HTML.encode())[:-20], headers=html | {"Content-Encoding": "gzip"}
                )
            case ["packed", "members"]:
                half = len(HTML) // 2
                body = b"".join(gzip.compress(part.encode()) for part in (HTML[:half], "", HTML[half:]))
                return web.Response(body=body + bytes(100), headers=html | {"Content-Encoding": "gzip"})
            case ["packed", "member-and-junk"]:
                body = gzip.compress(HTML.encode()) + b"junk"
                return web.Response(body=body, headers=html | {"Content-Encoding": "gzip"})
            case ["packed", "member-and-cut"]:
                body = gzip.compress(HTML.encode()) + gzip.compress(b"more of it")[:-9]
                return web.Response(body=body, headers=html | {"Content-Encoding": "gzip"})
            case ["packed", "members-of-nothing"]:
                return web.Response(body=gzip.compress(b"") * 50_000, headers=html | {"Content-Encoding": "gzip"})
            case ["packed", "deflate"]:
                return web.Response(body=zlib.compress(HTML.encode()), headers=html | {"Content-Encoding": "deflate"})
            case ["packed", "deflate-alone"]:
                packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
                body = packer.compress(HTML.encode()) + packer.flush()
                return web.Response(body=body, headers=html | {"Content-Encoding": "deflate"})
            case ["packed"]:
                return web.Response(body=gzip.compress(HTML.encode()), headers=html | {"Content-Encoding": "gzip"})
            case ["endless"]:
                chunk = b"<p>" + b"endless words " * 4000 + b"</p>"
                return await _stream(request, chunk, pause_s=0, headers=html)
            case ["drip"]:
                return await _stream(request, b"x", pause_s=0.05, headers=html)
            case ["latin"]:
                body = HTML.replace("town", "café").encode("latin-1")
                return web.Response(body=body, headers={"Content-Type": "text/html; charset=utf-8"})
            case ["utf8-as-latin"]:
                body = HTML.replace("town", "café").encode()
                return web.Response(body=body, headers={"Content-Type": "text/html; charset=iso-8859-1"})
            case ["zip-charset"]:
                return web.Response(body=b"\xff\xfe\xfa plain", headers={"Content-Type": "text/plain; charset=zip"})
            case ["nested"]:
                return web.Response(body=b"<div>" * 300_000 + HTML.encode(), headers=html)
            case ["breaks", *_]:  # takes the parser many seconds
                return web.Response(body=b"<html><body><p>" + b"x<br>" * 900_000, headers=html)
            case ["links"]:  # takes the parser a hundred times its size
                return web.Response(body=b"<html><body>" + b"<a href=x>word</a> " * 30_000, headers=html)
            case ["nul"]:
                return web.Response(body=HTML.replace("bridge", "bri\0dge").encode(), headers=html)
            case ["image"]:
                return web.Response(body=bytes(range(256)), content_type="image/png")
            case ["empty"]:
                return web.Response(body=b"", headers=html)
            case ["headers"]:
                return web.Response(text="x", headers={f"X-{n}": "y" * 8000 for n in range(200)})
            case ["cookie"]:
                return web.Response(text=str(dict(request.cookies)), headers={"Set-Cookie": "a=b"})
            case ["robots.txt"]:
                return web.Response(text="User-agent: *\nDisallow: /page\n")
            case ["busy"]:
                return web.Response(status=503)
            case _:
                return web.Response(status=404)

    async def summarise(request: web.Request) -> web.Response:
        """Act as a model that summarises pages."""
        body = await request.json()
        site.requested.append(
            f"{request.headers.get('Authorization')} {body['model']} {body['messages'][0]['content']}"
        )
        if body["model"] == "absent":
            return web.Response(status=404)
        content = {"silent": None, "blank": " \n"}.get(body["model"], "417 live in Qzlf.")
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    app = web.Application()
    app[SITE] = site
    app.router.add_post("/v1/chat/completions", summarise)
    app.router.add_get("/{path:.*}", serve)
    return app


@contextmanager
def hostile_site() -> Iterator[Site]:
    """Serve the site in a thread, on both addresses at one port."""
    site = Site()
    with serving(_application(site), PERMITTED, FORBIDDEN) as site.port:
        yield site
