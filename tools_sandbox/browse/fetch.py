"""One HTTP GET with bounds on its addresses, its size and its redirects."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Awaitable, Callable

import aiohttp
from yarl import URL

from tools_sandbox.browse.addresses import AddressPolicy, AddressRefused
from tools_sandbox.browse.names import Resolver
from tools_sandbox.browse.page import FetchFailed, Page
from tools_sandbox.config import BrowseConfig

Permit = Callable[[str], Awaitable[bool]]
"""Return whether an address may be read (robots.txt)."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WEB_PORTS = frozenset({80, 443})
_MAX_URL_CHARS = 4096
_GZIP_FIRST = 0x1F
_MAX_MEMBERS = 1000
"""Most members of a gzip body. Empty members cost time but produce no bytes."""


async def fetch(url: str, config: BrowseConfig, policy: AddressPolicy, permit: Permit | None = None) -> Page:
    """Return the page at an address, after redirects. Raises FetchFailed. The caller must bound the time.

    permit: asked before each address is read, including the targets of redirects.
    """
    refused: list[AddressRefused] = []

    def checked_socket(address_info: aiohttp.AddrInfoType) -> socket.socket:
        try:
            return policy.checked_socket(address_info)
        except AddressRefused as error:
            refused.append(error)
            raise

    # The session serves one call only, so that no state is carried from one page to another.
    connector = aiohttp.TCPConnector(
        resolver=Resolver(),
        socket_factory=checked_socket,
        use_dns_cache=False,
        force_close=True,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        # Decompressed below, with bounds.
        auto_decompress=False,
        # A proxy would resolve the name again, and its result could not be checked.
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
            raise _failure(url, error) from error


def _failure(url: str, error: Exception) -> FetchFailed:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return FetchFailed(f"{url} cannot be read: its certificate is not valid.", lasting=True)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return FetchFailed(f"{url} cannot be read: there is no host {error.host}.", lasting=True)
    problem = " ".join(str(error).split())[:200]
    return FetchFailed(f"{url} cannot be read: {type(error).__name__}: {problem}", lasting=False)


async def _follow(session: aiohttp.ClientSession, url: str, config: BrowseConfig, permit: Permit | None) -> Page:
    target = _parse_url(url)
    for _ in range(config.max_redirects + 1):
        if permit is not None and not await permit(str(target)):
            raise FetchFailed(f"{target} is refused: the site's robots.txt does not permit it.", lasting=True)
        async with session.get(target, allow_redirects=False) as reply:
            if reply.status in _REDIRECTS and (location := reply.headers.get("Location")):
                target = _parse_url(str(target.join(URL(location))))
                continue
            if not 200 <= reply.status < 300:
                passes = reply.status == 429 or reply.status >= 500
                raise FetchFailed(f"{target} cannot be read: HTTP {reply.status} {reply.reason}.", lasting=not passes)
            body, cut = await _body(reply, config.max_bytes)
            declared = reply.headers.get("Content-Type", "")
            kind = declared.partition(";")[0].strip().lower()
            return Page(str(target), kind, reply.charset, body, cut)
    raise FetchFailed(f"{url} cannot be read: more than {config.max_redirects} redirects.", lasting=True)


def _parse_url(url: str) -> URL:
    if len(url) > _MAX_URL_CHARS:
        raise FetchFailed(f"The address is longer than {_MAX_URL_CHARS} characters.", lasting=True)
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


class _Decompressor:
    """A bounded decompressor of gzip, zlib and deflate bodies. A gzip body may have several members (RFC 1952)."""

    def __init__(self, encoding: str) -> None:
        self._deflate = encoding == "deflate"
        self._stream: zlib._Decompress | None = None
        self._members = 0
        self.cut = False
        """True if the body ended before its end mark, or invalid data follows a member."""

    def feed(self, chunk: bytes, room: int) -> bytes:
        """Return the next bytes of the body, at most `room`. Raises zlib.error for invalid data."""
        unpacked = bytearray()
        while chunk and len(unpacked) < room and self._members <= _MAX_MEMBERS:
            if self._stream is None:
                self._stream = zlib.decompressobj(self._window(chunk))
                self._members += 1
                self.cut = True
            try:
                unpacked += self._stream.decompress(chunk, room - len(unpacked))
            except zlib.error:
                if self._members == 1:
                    raise
                self._members = _MAX_MEMBERS + 1  # keep what was decompressed, and read no more
                break
            if not self._stream.eof:
                break
            # Zero bytes may pad the end.
            chunk, self._stream, self.cut = self._stream.unused_data.lstrip(b"\0"), None, False
        return bytes(unpacked)

    def _window(self, chunk: bytes) -> int:
        """Return the `wbits` of zlib: +32 detects a gzip or zlib header; negative means raw deflate."""
        headed = chunk[0] == _GZIP_FIRST or chunk[0] & 0x0F == zlib.DEFLATED
        return 32 + zlib.MAX_WBITS if headed or not self._deflate or self._members else -zlib.MAX_WBITS


async def _body(reply: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """Return at most max_bytes of the body, and whether it is incomplete. The limit also holds for the packed bytes."""
    encoding = reply.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    if encoding not in {"identity", "gzip", "x-gzip", "deflate"}:
        raise FetchFailed(f"{reply.url} is packed in a way that was not asked for ({encoding[:40]}).", lasting=True)
    unpack = None if encoding == "identity" else _Decompressor(encoding)
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
