"""Sizes of engines, as they report them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Sizes of an engine."""

    tokens: int
    """Size of its KV pool."""
    requests: int
    """Largest number of requests that it runs at the same time."""


async def read_rooms(session: aiohttp.ClientSession, urls: Sequence[str], *, wait_s: float) -> list[EngineRoom]:
    """Return what each engine can hold; an empty list if one does not report it, or none is up for `wait_s` seconds.

    An engine that is down counts as equal to one that is up.
    """
    give_up = asyncio.get_running_loop().time() + wait_s
    while True:
        found = await asyncio.gather(*(_read(session, url) for url in urls), return_exceptions=True)
        known = [room for room in found if not isinstance(room, BaseException)]
        if known or asyncio.get_running_loop().time() > give_up:
            break
        await asyncio.sleep(_INTERVAL_S)
    reported = [room for room in known if room is not None]
    if not known or len(reported) < len(known):
        return []
    return [room if isinstance(room, EngineRoom) else reported[0] for room in found]


def parse_room(info: Mapping[str, Any]) -> EngineRoom | None:
    """Return what an engine can hold, given its `/server_info`; None if that does not say it."""
    states = info.get("internal_states") or [{}]
    requests = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    tokens = info.get("max_total_num_tokens")
    return EngineRoom(int(tokens), int(requests)) if tokens and requests else None


async def _read(session: aiohttp.ClientSession, url: str) -> EngineRoom | None:
    async with session.get(f"{url}/server_info", timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as response:
        if response.status == 404:
            return None
        response.raise_for_status()
        return parse_room(await response.json())
