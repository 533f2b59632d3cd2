"""Growing a branch again: sampled by a served agent, scored like the stored trajectories, shown next to them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import step_file
from arpo_megatron.view.grow import Grower
from arpo_megatron.view.pages import Pages
from arpo_megatron.view.server import application
from tests.engine.scripted import CharacterCodec, ScriptedEngine
from tests.serving.test_serve import TOKEN, Start, served
from tests.view.stored_run import TOKENIZER, decode, make_run

ANSWER = "<think>so</think><answer>\\boxed{4}</answer>"
NOWHERE = "http://127.0.0.1:9"  # no tool is called
TREE = "/data/run/trees/1/0"


class RunCodec(CharacterCodec):
    """The tokenizer of the stored run."""

    def encode(self, text: str) -> list[int]:
        return list(TOKENIZER.encode(text).ids)

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(list(token_ids))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "run", steps=1)


@pytest.fixture
def pages(run: RunDirectory, scripted_engine: Start) -> Iterator[Pages]:
    rest = "".join(map(chr, RunCodec().encode(ANSWER)))
    engine = scripted_engine(ScriptedEngine(lambda _text: rest))
    with served(engine.url, NOWHERE, codec=RunCodec(), concurrency=16) as url:
        yield Pages({"run": run}, grower=Grower(f"{url}/v1", TOKEN))


def test_continuations_stand_next_to_the_stored_branches(pages: Pages, run: RunDirectory) -> None:
    before, file = pages.answer("run", "trees", "1", "0"), step_file(run, 1).read_bytes()
    grown = pages.grow("run", "1", 0, segment=2, count=3)
    assert grown["leaves"][: len(before["leaves"])] == before["leaves"]
    assert grown["segments"][: len(before["segments"])] == before["segments"]
    new = grown["leaves"][len(before["leaves"]) :]
    assert [(leaf["reward"], leaf["answer"], leaf["grown"]) for leaf in new] == [(1.0, "4", 0)] * 3
    for leaf in new:
        segment = grown["segments"][leaf["segment"]]
        assert (segment["parent"], segment["finish"], segment["policy_version"]) == (2, "end", 7)
        assert segment["text"].startswith(ANSWER) and len(segment["logprobs"]) == segment["tokens"]
        assert "".join(segment["pieces"]) == segment["text"]
    (fact,) = grown["growths"]
    assert fact == {"segment": 2, "weights": "export, step 4", "temperature": 1.0, "note": "", "count": 3}
    again = pages.grow("run", "1", 0, segment=0, count=1)
    assert [leaf.get("grown") for leaf in again["leaves"]] == [*[None] * len(before["leaves"]), 0, 0, 0, 1]
    assert pages.answer("run", "trees", "1", "0") == again, "the page finds them when it is loaded again"
    assert step_file(run, 1).read_bytes() == file
    os.utime(step_file(run, 1))  # a resumed run has replaced it
    assert pages.answer("run", "trees", "1", "0") == before


def test_a_place_or_an_agent_that_does_not_fit_is_refused(pages: Pages, run: RunDirectory) -> None:
    with pytest.raises(UserError, match="segment 1 is no prompt and no tool answer"):
        pages.grow("run", "1", 0, segment=1, count=1)
    with pytest.raises(UserError, match="17 continuations: ask for 1 to 16"):
        pages.grow("run", "1", 0, segment=2, count=17)
    with pytest.raises(UserError, match=r"start arpo view with --grow"):
        Pages({"run": run}).grow("run", "1", 0, segment=2, count=1)
    with pytest.raises(UserError, match="does not answer as `arpo serve`"):
        Grower(f"{NOWHERE}/v1", "").weights()


def test_agent_with_another_tokenizer_is_refused(run: RunDirectory, scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "x"))
    with served(engine.url, NOWHERE) as url, pytest.raises(UserError, match="another tokenizer than the run"):
        Pages({"run": run}, grower=Grower(f"{url}/v1", TOKEN)).grow("run", "1", 0, segment=2, count=1)


def test_only_the_page_itself_may_grow(pages: Pages) -> None:
    client = TestClient(application(pages, None, "127.0.0.1"), base_url="http://127.0.0.1:8750")
    body = {"segment": 2, "count": 1}
    grown = client.post(f"{TREE}/grow", json=body)
    assert grown.status_code == 200 and len(grown.json()["growths"]) == 1
    assert client.post(f"{TREE}/grow", json=body, headers={"Origin": "http://127.0.0.1:8750"}).status_code == 200
    for headers in ({"Origin": "http://example.com"}, {"Content-Type": "text/plain"}):
        assert client.post(f"{TREE}/grow", json=body, headers=headers).status_code == 403
    assert client.post(f"{TREE}/grow", json={"segment": "x"}).status_code == 400
    assert client.post(f"{TREE}/grow", json={"segment": 1, "count": 1}).json()["error"].startswith("segment 1 is")
    assert len(client.get(TREE).json()["growths"]) == 2
    assert client.get("/data/").json()["grow"] is True
