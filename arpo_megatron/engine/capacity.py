"""Capacities of engines, as they report them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Size of an engine's KV pool and of its largest batch."""

    tokens: int
    """Size of its KV pool."""
    requests: int
    """Largest number of requests that it runs at the same time."""


async def read_capacities(
    session: aiohttp.ClientSession, urls: Sequence[str], *, wait_s: float
) -> list[EngineCapacity]:
    """Return the capacity of each engine; an empty list if one does not report it, or none is up for `wait_s` seconds.

    An engine that is down counts as equal to one that is up.
    """
    give_up = asyncio.get_running_loop().time() + wait_s
    while True:
        found = await asyncio.gather(*(_read(session, url) for url in urls), return_exceptions=True)
        known = [each for each in found if not isinstance(each, BaseException)]
        if known or asyncio.get_running_loop().time() > give_up:
            break
        await asyncio.sleep(_INTERVAL_S)
    reported = [each for each in known if each is not None]
    if not known or len(reported) < len(known):
        return []
    return [each if isinstance(each, EngineCapacity) else reported[0] for each in found]


def parse_capacity(info: Mapping[str, Any]) -> EngineCapacity | None:
    """Return the capacity of an engine, given its `/server_info`; None if that does not say it."""
    states = info.get("internal_states") or [{}]
    requests = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    tokens = info.get("max_total_num_tokens")
    return EngineCapacity(int(tokens), int(requests)) if tokens and requests else None


def total_capacity(capacities: Sequence[EngineCapacity]) -> EngineCapacity:
    """Return the capacity of several engines together."""
    return EngineCapacity(sum(each.tokens for each in capacities), sum(each.requests for each in capacities))


async def _read(session: aiohttp.ClientSession, url: str) -> EngineCapacity | None:
    async with session.get(f"{url}/server_info", timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as response:
        if response.status == 404:
            return None
        response.raise_for_status()
        return parse_capacity(await response.json())
