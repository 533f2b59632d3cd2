"""`rollout.across_push=keep_kv` on a real engine: a push leaves the keys and values where trees continue."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.request import Sampling
from tests.engine.fixtures import ENGINE

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow_campaign]

PROMPT = [10 + number % 9 for number in range(90)]


def post(engine: EngineHandle, path: str, body: dict[str, object]) -> int:
    request = urllib.request.Request(
        f"{engine.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def push(engine: EngineHandle, model: Path, version: int) -> None:
    assert post(engine, "/arpo/begin_push", {"version": version, "timeout_s": 30.0}) == 200
    body = {"model_path": str(model), "load_format": "safetensors", "flush_cache": False}
    assert post(engine, "/update_weights_from_disk", body) == 200
    assert post(engine, "/arpo/commit_push", {"version": version, "loads": 1, "timeout_s": 30.0}) == 200


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_tree_continues_on_its_keys_and_values_after_a_push(tiny_model: Path, tmp_path: Path, keeps_kv: bool) -> None:
    async def run(engine: EngineHandle) -> list[int]:
        await asyncio.to_thread(push, engine, tiny_model, 0)
        async with EngineClient(engine.url, keeps_kv=keeps_kv, streams=True) as client:
            client.begin_tree("old", 0)
            # A generation is in the engine when the pause comes: its tokens stay in the cache, too.
            began = asyncio.Event()
            first = 4, lambda _tokens: began.set()
            long = asyncio.create_task(
                client.generate(PROMPT, max_new_tokens=1500, sampling=Sampling(), stop=(), key="old", first=first)
            )
            await began.wait()
            await client.pause()
            await asyncio.to_thread(push, engine, tiny_model, 1)
            client.resume(1)
            client.begin_tree("new", 1)
            cut = await long
            assert cut.weight_version == 0
            longer = [*PROMPT, *cut.token_ids.tolist()]
            found = [(await client.prefill(ids, key="old"))[1] for ids in (PROMPT, longer)]
            return [*found, len(longer), *[(await client.prefill(PROMPT, key="new"))[1] for _ in range(2)]]

    with launch_engine(
        tiny_model, ENGINE, dtype="float32", seed=1, log_path=tmp_path / "engine.log", keeps_kv=keeps_kv
    ) as engine:
        prompt, longer, length, first, second = asyncio.run(run(engine))
    if keeps_kv:
        assert prompt >= len(PROMPT) - 1 and longer >= length - 2, "the tree finds all that it had"
        assert first == 0 and second >= len(PROMPT) - 1, "a new tree computes its own"
    else:
        assert prompt == 0, "the push has emptied the cache"


def test_first_push_empties_the_cache_of_a_restarted_engine(tiny_model: Path, tmp_path: Path) -> None:
    """A prefill that arrived before the push has computed keys and values of the weights of the start."""

    async def run(engine: EngineHandle) -> tuple[int, int]:
        async with EngineClient(engine.url, keeps_kv=True, retry_for_s=20.0) as client:
            client.resume(1)
            stale = asyncio.Event()
            client.on_stale = lambda _url: stale.set()
            client.begin_tree("new", 1)
            first = asyncio.create_task(client.prefill(PROMPT, key="new"))
            await stale.wait()
            await client.pause()
            await asyncio.to_thread(push, engine, tiny_model, 1)
            client.resume(1)
            return (await first)[1], (await client.prefill(PROMPT, key="new"))[1]

    with launch_engine(
        tiny_model, ENGINE, dtype="float32", seed=1, log_path=tmp_path / "engine.log", keeps_kv=True
    ) as engine:
        cached, again = asyncio.run(run(engine))
    assert cached == 0
    assert again >= len(PROMPT) - 1
