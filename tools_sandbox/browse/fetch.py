"""One GET within bounds: where it may go, how much it may read, how often it is sent elsewhere."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from tools_sandbox.browse.addresses import AddressPolicy, AddressRefused
from tools_sandbox.browse.names import Resolver
from tools_sandbox.config import BrowseConfig

Permit = Callable[[str], Awaitable[bool]]
"""Whether an address may be read."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WEB_PORTS = frozenset({80, 443})
_LONGEST_URL = 4096
_GZIP_FIRST = 0x1F
_MOST_MEMBERS = 1000
"""Of a gzip body; empty ones cost time and no bytes."""


class FetchFailed(Exception):  # noqa: N818 - an outcome
    """There is no page; the message is for the model. lasting: asking again soon will not help."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Page:
    """What a server answered."""

    url: str
    """The address after redirects."""
    content_type: str
    """Without parameters, lower case; empty if the server named none."""
    charset: str | None
    """As the server named it."""
    body: bytes
    """After decompression."""
    cut: bool
    """True if there was more: above the limit, or where packed content ended before its end."""


async def fetch(url: str, config: BrowseConfig, policy: AddressPolicy, permit: Permit | None = None) -> Page:
    """The page at an address, redirects followed. FetchFailed; the caller bounds the time.

    permit: asked before each address is read, also those that redirects lead to.
    """
    refused: list[AddressRefused] = []

    def checked_socket(address_info: aiohttp.AddrInfoType) -> socket.socket:
        try:
            return policy.checked_socket(address_info)
        except AddressRefused as error:
            refused.append(error)
            raise

    # Connections of one call only: nothing of one page is carried to another.
    connector = aiohttp.TCPConnector(
        resolver=Resolver(),
        socket_factory=checked_socket,
        use_dns_cache=False,
        force_close=True,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        # Decompressed here, where it can be bounded.
        auto_decompress=False,
        # A proxy would resolve the name a second time, out of our sight.
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None),
        headers={
            "User-Agent": config.user_agent,
            "Accept": "text/html,text/plain;q=0.9,*/*;q=0.5",
            "Accept-Encoding": "gzip, deflate",
        },
    ) as session:
        try:
            return await _follow(session, url, config, permit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if refused:
                raise FetchFailed(f"{url} is refused: {refused[0]}.", lasting=True) from error
            raise _failed(url, error) from error


def _failed(url: str, error: Exception) -> FetchFailed:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return FetchFailed(f"{url} cannot be read: its certificate is not valid.", lasting=True)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return FetchFailed(f"{url} cannot be read: there is no host {error.host}.", lasting=True)
    said = " ".join(str(error).split())[:200]
    return FetchFailed(f"{url} cannot be read: {type(error).__name__}: {said}", lasting=False)


async def _follow(session: aiohttp.ClientSession, url: str, config: BrowseConfig, permit: Permit | None) -> Page:
    target = _checked(url)
    for _ in range(config.max_redirects + 1):
        if permit is not None and not await permit(str(target)):
            raise FetchFailed(f"{target} is refused: the site's robots.txt does not permit it.", lasting=True)
        async with session.get(target, allow_redirects=False) as reply:
            if reply.status in _REDIRECTS and (location := reply.headers.get("Location")):
                target = _checked(str(target.join(URL(location))))
                continue
            if not 200 <= reply.status < 300:
                passes = reply.status == 429 or reply.status >= 500
                raise FetchFailed(f"{target} cannot be read: HTTP {reply.status} {reply.reason}.", lasting=not passes)
            body, cut = await _body(reply, config.max_bytes)
            declared = reply.headers.get("Content-Type", "")
            kind = declared.partition(";")[0].strip().lower()
            return Page(str(target), kind, reply.charset, body, cut)
    raise FetchFailed(f"{url} cannot be read: more than {config.max_redirects} redirects.", lasting=True)


def _checked(url: str) -> URL:
    if len(url) > _LONGEST_URL:
        raise FetchFailed(f"The address is longer than {_LONGEST_URL} characters.", lasting=True)
    try:
        target = URL(url)
        port = target.port
    except ValueError as error:
        raise FetchFailed(f"{url!r} is no address: {error}.", lasting=True) from error
    if target.scheme not in {"http", "https"} or not target.host:
        raise FetchFailed(f"{url!r} is no address of a web page; it begins with http:// or https://.", lasting=True)
    if target.user is not None or target.password is not None:
        raise FetchFailed("An address with a user name or password in it is refused.", lasting=True)
    if port is not None and port < 1024 and port not in _WEB_PORTS:
        raise FetchFailed(f"Port {port} is not for web pages; {url!r} is refused.", lasting=True)
    return target


class _Unpack:
    """What gzip, zlib and deflate bodies unpack to, with bounds. A gzip body may have several members (RFC 1952)."""

    def __init__(self, encoding: str) -> None:
        self._deflate = encoding == "deflate"
        self._stream: zlib._Decompress | None = None
        self._members = 0
        self.cut = False
        """True if the body ended before its own end mark, or what follows a member is none."""

    def feed(self, chunk: bytes, room: int) -> bytes:
        """At most `room` bytes, the next of the body. zlib.error: it is not packed as it says."""
        unpacked = bytearray()
        while chunk and len(unpacked) < room and self._members <= _MOST_MEMBERS:
            if self._stream is None:
                self._stream = zlib.decompressobj(self._window(chunk))
                self._members += 1
                self.cut = True
            try:
                unpacked += self._stream.decompress(chunk, room - len(unpacked))
            except zlib.error:
                if self._members == 1:
                    raise
                self._members = _MOST_MEMBERS + 1  # what was unpacked stands; no more is read
                break
            if not self._stream.eof:
                break
            # Zeros may fill up the end.
            chunk, self._stream, self.cut = self._stream.unused_data.lstrip(b"\0"), None, False
        return bytes(unpacked)

    def _window(self, chunk: bytes) -> int:
        """For zlib: 32 added means a gzip or a zlib header; less than 0 none, as some servers understand deflate."""
        headed = chunk[0] == _GZIP_FIRST or chunk[0] & 0x0F == zlib.DEFLATED
        return 32 + zlib.MAX_WBITS if headed or not self._deflate or self._members else -zlib.MAX_WBITS


async def _body(reply: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """At most max_bytes, of what is sent and of what it unpacks to; and whether there was or should have been more."""
    encoding = reply.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    if encoding not in {"identity", "gzip", "x-gzip", "deflate"}:
        raise FetchFailed(f"{reply.url} is packed in a way that was not asked for ({encoding[:40]}).", lasting=True)
    unpack = None if encoding == "identity" else _Unpack(encoding)
    body, received = bytearray(), 0
    async for chunk in reply.content.iter_any():
        received += len(chunk)
        room = max_bytes - len(body)
        try:
            body += chunk[: room + 1] if unpack is None else unpack.feed(chunk, room + 1)
        except zlib.error as error:
            raise FetchFailed(f"{reply.url} cannot be unpacked: {error}.", lasting=False) from error
        if len(body) > max_bytes or received > max_bytes:
            reply.close()
            return bytes(body[:max_bytes]), True
    return bytes(body), unpack is not None and unpack.cut
