"""robots.txt (RFC 9309), which is honoured if the operator configures it."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from urllib.robotparser import RobotFileParser

from yarl import URL

from tools_sandbox.browse.addresses import AddressPolicy
from tools_sandbox.browse.fetch import fetch
from tools_sandbox.browse.page import FetchFailed
from tools_sandbox.config import BrowseConfig

_MAX_SITES = 1000
_KEEP_S = 3600.0
_MAX_BYTES = 500_000


class Robots:
    """The robots.txt rules of sites, kept for an hour."""

    def __init__(self, config: BrowseConfig, policy: AddressPolicy) -> None:
        self._config, self._policy = replace(config, max_bytes=_MAX_BYTES), policy
        self._rules: OrderedDict[str, tuple[float, RobotFileParser]] = OrderedDict()

    async def permit(self, url: str) -> bool:
        """Return True if the site allows the address. A site without rules allows all; one that fails allows none."""
        origin = str(URL(url).origin())
        known = self._rules.get(origin)
        if known is None or known[0] < time.monotonic():
            known = (time.monotonic() + _KEEP_S, await self._fetch_rules(origin))
            self._rules[origin] = known
            while len(self._rules) > _MAX_SITES:
                self._rules.popitem(last=False)
        return known[1].can_fetch(self._config.user_agent, url)

    async def _fetch_rules(self, origin: str) -> RobotFileParser:
        rules = RobotFileParser()
        try:
            page = await fetch(f"{origin}/robots.txt", self._config, self._policy)
            rules.parse(page.body.decode("utf-8", "replace").splitlines())
        except FetchFailed as error:
            rules.parse([] if error.lasting else ["User-agent: *", "Disallow: /"])
        return rules
