"""Fixtures of the tool service's tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.tools_sandbox.helpers.attacks import ATTACKS
from tests.tools_sandbox.helpers.browsing import Browse, browse_with
from tests.tools_sandbox.helpers.hostile_site import Site, hostile_site
from tests.tools_sandbox.helpers.services import Service, StartService, running
from tools_sandbox.browse.parser import PageParser
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import BrowseConfig, PythonConfig

FIRST_OF_FAMILY = {attack.family: attack for attack in reversed(ATTACKS)}
FACTS = [f"fact{number} value{number}" for number in range(3000)] + ["qzlf 417", "Grüße 7"]
REMEMBERED = {
    "search query: Who wrote   Solaris": "Page 1: Stanisław Lem wrote the novel.\nPage 2: A film followed in 1972.",
    "capital of nowhere": "No search results found.",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If the tests run as root, leave most attacks on a service of an ordinary user to the campaign."""
    if os.getuid() != 0:
        return
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("attacked") == "user" and "attack" in params:
            attack = params["attack"]
            if FIRST_OF_FAMILY[attack.family] is not attack:
                item.add_marker(pytest.mark.slow_campaign)


@pytest.fixture
def start_service() -> Iterator[StartService]:
    """Return a function that starts a service, which ends with the test."""
    with ExitStack() as stack:

        def start(config: dict[str, Any] | None = None, **more: Any) -> Service:
            return stack.enter_context(running(config, **more))

        yield start


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service shared by all tests that leave it unchanged."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "facts.jsonl").write_text("".join(json.dumps({"text": fact}) + "\n" for fact in FACTS))
    (folder / "cache.json").write_text(json.dumps(REMEMBERED))
    config = {
        "limits": {"memory_mib": 512, "file_mib": 1, "output_chars": 1000},
        "log": {"calls": True},
        "workers": 1,
        "search": {
            "sources": [
                {"path": str(folder / "facts.jsonl"), "format": "jsonl"},
                {"path": str(folder / "cache.json"), "format": "arpo_cache"},
            ]
        },
    }
    with running(config) as started:
        yield started


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[SandboxClient]:
    with SandboxClient(service.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with hostile_site() as running_site:
        yield running_site


@pytest.fixture(scope="module")
def parser() -> Iterator[PageParser]:
    """A parser that the tests of a module share. It gives longer texts than any test wants."""
    started = PageParser(BrowseConfig(max_chars=1_000_000), PythonConfig())
    started.start()
    yield started
    started.close()


@pytest.fixture(scope="module")
def browse(parser: PageParser) -> Browse:
    return browse_with(parser)
