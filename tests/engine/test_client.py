"""Routing and retries of the engine client, against scripted engines and failing sockets."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.engine import affinity
from arpo_megatron.engine.affinity import FIRST_BACKOFF_S, MAX_BACKOFF_S, ROUTING_KEY_HEADER, EngineState, pick_engine
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.request import Generation, Sampling
from tests.engine.scripted import ScriptedEngine

Start = Callable[[ScriptedEngine], ScriptedEngine]
URLS = [f"http://10.0.0.{number}:30000" for number in range(8)]


def engines(count: int) -> list[EngineState]:
    return [EngineState(url) for url in URLS[:count]]


@given(st.text(), st.integers(1, 8))
def test_only_keys_of_a_failed_engine_move(key: str, count: int) -> None:
    fleet = engines(count)
    home = pick_engine(key, fleet, now=0.0)
    assert pick_engine(key, list(reversed(fleet)), now=0.0) is home
    other = next((engine for engine in fleet if engine is not home), None)
    if other is None:
        return
    other.record_failure(0.0)
    assert pick_engine(key, fleet, now=0.0) is home
    home.record_failure(0.0)
    assert pick_engine(key, fleet, now=FIRST_BACKOFF_S / 2) is not home or count == 2
    assert pick_engine(key, fleet, now=FIRST_BACKOFF_S) is home


def test_keys_are_spread_evenly() -> None:
    fleet = engines(4)
    shares = Counter(pick_engine(f"1/task-{number}", fleet, now=0.0).url for number in range(4000))
    assert all(850 < share < 1150 for share in shares.values())  # binomial: 1000 +- 27


def test_backoff_doubles_and_ends_with_an_answer() -> None:
    (engine,) = engines(1)
    now, rests = 0.0, []
    for _ in range(8):
        assert engine.record_failure(now)
        assert not engine.record_failure(now)  # the other requests that fail at the same moment
        rests.append(engine.backoff_until - now)
        now = engine.backoff_until
    assert rests[:3] == pytest.approx([FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S])
    assert rests[-1] == pytest.approx(MAX_BACKOFF_S)
    engine.record_answer()
    assert (engine.backoff_until, engine.backoff_s, engine.suspect) == (0.0, FIRST_BACKOFF_S, False)


def answer(client: EngineClient, key: str) -> Awaitable[Generation]:
    return client.generate([65, 66, 67], max_new_tokens=3, sampling=Sampling(0.0), key=key)


def scripted(start: Start, **fields: Any) -> ScriptedEngine:
    return start(ScriptedEngine(lambda _text: "xyz", **fields))


def test_tree_stays_on_one_engine_and_common_prefix_is_on_each(scripted_engine: Start) -> None:
    fleet = [scripted(scripted_engine) for _ in range(3)]

    async def run() -> None:
        async with EngineClient(*(engine.url for engine in fleet)) as client:
            assert await client.prefill_everywhere([65, 66]) == [(2, 0)] * 3
            await asyncio.gather(*(answer(client, f"tree-{number % 12}") for number in range(60)))

    asyncio.run(run())
    assert sum(len(engine.requests) for engine in fleet) == 63
    assert all(len(engine.requests) % 5 == 1 for engine in fleet)  # whole trees, and the common prefix once
    assert sum(len(engine.requests) > 1 for engine in fleet) > 1


def test_hanging_engine_does_not_delay_the_common_prefill(scripted_engine: Start) -> None:
    engines = [scripted_engine(ScriptedEngine(str, delay_s=lambda _text, s=s: s)) for s in (0.0, 60.0, 0.2)]

    async def run() -> tuple[list[tuple[int, int]], float]:
        async with EngineClient(*(engine.url for engine in engines)) as client:
            started = time.monotonic()
            return await client.prefill_everywhere([65] * 20), time.monotonic() - started

    found, seconds = asyncio.run(run())
    assert found == [(20, 0)] * 2
    assert seconds < 60.0  # as long as the one that hangs


def test_common_prefill_restarts_after_a_push(
    scripted_engine: Start,
) -> None:
    engines = [scripted_engine(ScriptedEngine(str, delay_s=lambda _text: 0.5)) for _ in range(2)]

    async def run() -> list[tuple[int, int]]:
        async with EngineClient(*(engine.url for engine in engines)) as client:
            asked = asyncio.create_task(client.prefill_everywhere([65] * 20))
            while not all(engine.requests for engine in engines):
                await asyncio.sleep(0.01)
            await client.pause()
            client.resume(0)
            return await asked

    assert len(asyncio.run(run())) == 2
    assert [len(engine.requests) for engine in engines] == [2, 2]


def test_pause_holds_requests_that_check_their_engine(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(str, fail_first=1, look_s=0.3))

    async def run() -> None:
        async with EngineClient(engine.url) as client:
            client.version = engine.version
            asked = asyncio.create_task(client.prefill([65] * 20))
            while not engine.looks:  # it has failed, so its version is asked for before it is used again
                await asyncio.sleep(0.01)
            await client.pause()
            await asyncio.sleep(0.6)
            assert len(engine.requests) == 1  # the one that failed
            client.resume(engine.version)
            assert await asked == (20, 0)

    asyncio.run(run())


def test_engine_with_old_weights_is_reported_and_not_used(scripted_engine: Start) -> None:
    old, new = scripted(scripted_engine, version=0), scripted(scripted_engine, version=4)
    reported: list[str] = []

    async def run() -> list[Generation]:
        async with EngineClient(old.url, new.url) as client:
            client.version, client.on_stale = 4, reported.append
            got = await asyncio.gather(*(answer(client, f"tree-{number}") for number in range(20)))
            assert set(client.retries) == {"stale"}
            return list(got)

    assert {part.weight_version for part in asyncio.run(run())} == {4}
    assert reported == [old.url]
    sampled = len(old.requests)

    async def wait_for_the_push() -> Generation:
        async with EngineClient(old.url) as client:
            client.version, client.on_stale = 4, reported.append
            waiting = asyncio.create_task(asyncio.wait_for(answer(client, "tree"), 10))
            await asyncio.sleep(0.4)
            assert not waiting.done()
            old.version = 4
            return await waiting

    assert asyncio.run(wait_for_the_push()).weight_version == 4
    assert len(old.requests) == sampled + 2  # one was thrown away; then its version was looked at before it was asked


@dataclass
class Router(ScriptedEngine):
    """Sends each routing key to one engine, regardless of its weights."""

    engines: list[ScriptedEngine] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)

    async def generate(self, request: web.Request) -> web.Response:
        key = request.headers[ROUTING_KEY_HEADER]
        self.keys[key] += 1
        return await self.engines[int(key) % len(self.engines)].generate(request)


def test_trees_bypass_a_router_to_an_engine_with_old_weights(scripted_engine: Start) -> None:
    old, new = scripted(scripted_engine, version=0), scripted(scripted_engine, version=4)
    router = Router(str, engines=[old, new])
    scripted_engine(router)
    reported: list[str] = []

    async def run() -> None:
        async with EngineClient(old.url, new.url, router=router.url) as client:
            client.version, client.on_stale = 4, reported.append
            async with asyncio.timeout(10):
                for _ in range(5):
                    got = await asyncio.gather(*(answer(client, str(number)) for number in range(20)))
                    assert {part.weight_version for part in got} == {4}
            assert set(reported) == {old.url}  # again after a rest, on a busy machine
            assert len(old.requests) == 10  # one of each of its trees
            assert router.keys == {str(number): 5 if number % 2 else 1 for number in range(20)}
            old.version = 5
            client.resume(4)
            got = await asyncio.gather(*(answer(client, str(number)) for number in range(20)))
            assert [part.weight_version for part in got] == [5, 4] * 10  # each tree is where the router has it

    asyncio.run(run())


@pytest.mark.parametrize("routed", [False, True])
def test_failed_request_leaves_other_trees_and_the_cache_alone(
    scripted_engine: Start, routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affinity, "FIRST_BACKOFF_S", 600.0)
    failing = [True]
    engine = scripted(
        scripted_engine, fails=lambda body: body["input_ids"][0] == 1 and failing.pop() if failing else False
    )

    async def run() -> None:
        urls = [engine.url, "http://127.0.0.1:9"]
        async with EngineClient(*(urls if routed else urls[:1]), router=engine.url if routed else None) as client:
            await asyncio.gather(answer(client, "a"), answer(client, "b"))
            caches = [client.cache_id(key) for key in "ab"]
            failed = asyncio.create_task(client.generate([1], max_new_tokens=3, sampling=Sampling(0.0), key="a"))
            while not client.retries:
                await asyncio.sleep(0.001)
            assert [client.cache_id(key) for key in "ab"] == caches
            await answer(client, "b")
            assert dict(client.retries) == {"HTTP 500": 1} and not failed.done()
            failed.cancel()

    asyncio.run(run())


def test_request_that_fails_three_times_moves_its_own_tree_only(scripted_engine: Start) -> None:
    """The cause may be that request."""
    failures = [1, 1, 1]
    engines = [
        scripted(
            scripted_engine, fails=lambda body: body["input_ids"][0] == 1 and bool(failures) and failures.pop() > 0
        )
        for _ in range(2)
    ]

    async def run() -> None:
        async with EngineClient(*(engine.url for engine in engines)) as client:
            keys = [str(n) for n in range(20)]
            for key in keys:
                client.pin(key, engines[0].url)
            await asyncio.gather(*(answer(client, key) for key in keys))
            before = len(engines[1].requests)
            await client.generate([1], max_new_tokens=3, sampling=Sampling(0.0), key="0")
            assert dict(client.retries) == {"HTTP 500": 3}
            assert len(engines[1].requests) == before + 1, "the fourth attempt went to the other engine"
            assert client.cache_id("0")[0] == engines[1].url, "where the tree's prefix is now"
            assert {client.cache_id(key)[0] for key in keys[1:]} == {engines[0].url}
            client.resume(7)
            assert client.cache_id("0")[0] == engines[0].url, "a push has emptied the caches"

    asyncio.run(run())


def test_timeout_moves_no_tree(scripted_engine: Start) -> None:
    """The engine is busy; elsewhere the tree's prefixes would have to be computed again."""
    slow = [True]
    engines = [scripted(scripted_engine, delay_s=lambda _text: 6.0 if slow and slow.pop() else 0.0) for _ in range(2)]

    async def run() -> None:
        async with EngineClient(*(engine.url for engine in engines), request_timeout_s=2.0) as client:
            before = client.cache_id("tree")[0]
            await answer(client, "tree")
            assert dict(client.retries) == {"timeout": 1}
            assert client.cache_id("tree")[0] == before

    asyncio.run(run())
    assert sorted(len(engine.requests) for engine in engines) == [0, 2]


@pytest.mark.parametrize("routed", [False, True])
def test_restart_of_an_engine_changes_its_cache(scripted_engine: Start, routed: bool) -> None:
    engine = scripted(scripted_engine)
    flaky = Flaky(engine.url, [])

    async def run() -> None:
        server = await asyncio.start_server(flaky.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with EngineClient(url, router=url if routed else None) as client:
            await answer(client, "tree")
            before, seen = client.cache_id("tree"), []
            engine.incarnation = "second"
            flaky.faults.append("reset")

            async def ready() -> None:
                seen.append(client.cache_id("tree"))

            await client.generate([65], max_new_tokens=3, sampling=Sampling(0.0), key="tree", ready=ready)
            # Before the request is repeated, the tree notices that its prefixes may be lost.
            assert seen[0] == before
            assert seen[-1] != before
            assert client.cache_id("tree") == (url, "second", 0)
        server.close()

    asyncio.run(run())


def test_request_fails_if_no_push_comes(scripted_engine: Start) -> None:
    old = scripted(scripted_engine, version=2)

    async def run() -> None:
        async with EngineClient(old.url, retry_for_s=0.3) as client:
            client.version = 3
            await answer(client, "tree")

    with pytest.raises(EngineUnavailableError, match="serves policy version 2, not 3"):
        asyncio.run(run())


@dataclass
class Flaky:
    """A TCP proxy of an engine that applies one of `faults` to each generation, while any is left."""

    target: str
    faults: list[str]
    met: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.removeprefix("http://").rpartition(":")
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            fault = ""
            if head.startswith(b"POST"):
                fault = self.faults.pop(0) if self.faults else ""
                self.met.append(fault)
            lines = head.decode().lower().split("\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith("content-length")), 0)
            body = await reader.readexactly(length)
            if fault == "reset":
                writer.transport.abort()
                return
            if fault == "hang":
                await asyncio.sleep(60)
            if fault.startswith("{"):
                body = fault.encode("latin-1")
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}".encode()
                writer.write(head + b"\r\nconnection: close\r\n\r\n" + body)
            elif fault.isdecimal():
                writer.write(f"HTTP/1.1 {fault} Oh\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            else:
                there, back = await asyncio.open_connection(host, int(port))
                back.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
                writer.write(await (there.readexactly(40) if fault == "cut" else there.read()))
                back.close()
            await writer.drain()
        finally:
            writer.close()


@pytest.mark.parametrize(
    ("faults", "counted"),
    [
        (["reset", "reset"], {"connection": 2}),
        (["cut"], {"connection": 1}),
        (["500", "502", "503"], {"HTTP 500": 1, "HTTP 502": 1, "HTTP 503": 1}),
        (["hang"], {"timeout": 1}),
        (["408", "429"], {"HTTP 408": 1, "HTTP 429": 1}),
        (['{"output_ids": [1, 2', '{"output_ids": "\xff"}', '{"error": "x"}'], {"unreadable": 3}),
    ],
)
def test_transient_failures_are_retried_and_counted(
    scripted_engine: Start, faults: list[str], counted: dict[str, int]
) -> None:
    flaky = Flaky(scripted(scripted_engine).url, list(faults))

    async def run() -> None:
        server = await asyncio.start_server(flaky.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with EngineClient(url, request_timeout_s=1.0 if "hang" in faults else 60.0, retry_for_s=60) as client:
            drawn = await answer(client, "tree")
            assert drawn.token_ids.tolist() == [ord(letter) for letter in "xyz"]
            assert dict(client.retries) == counted
        server.close()

    asyncio.run(run())
    assert flaky.met == [*faults, ""]


def test_trees_of_each_policy_version_have_a_part_of_a_kept_cache(scripted_engine: Start) -> None:
    """A push with `rollout.across_push=keep_kv` leaves old keys and values, which a new tree must not read."""
    engine = scripted_engine(ScriptedEngine(lambda _text: "yes\0"))

    async def run() -> list[tuple[str, str | None, int]]:
        seen = []
        async with EngineClient(engine.url, keeps_kv=True) as client:
            client.resume(3)
            client.begin_tree("old", 3)
            for version in (3, 4):
                client.resume(version)
                client.begin_tree(f"new in {version}", version)
                for key in ("old", f"new in {version}"):
                    await client.generate([104, 105], max_new_tokens=4, sampling=Sampling(), key=key)
                    seen.append((key, engine.requests[-1]["extra_key"], client.cache_id(key)[2]))
            await client.prefill([104, 105], key="old")
            client.end_tree("old")
            await client.prefill([104, 105], key="old")
        return seen

    assert asyncio.run(run()) == [("old", "3", 3), ("new in 3", "3", 3), ("old", "3", 3), ("new in 4", "4", 4)]
    assert [request["extra_key"] for request in engine.requests[-2:]] == ["3", "4"]
