"""Any output of the model has a defined outcome (docs/concepts/trees.md), and the tree has the engine's tokens."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_megatron.algorithms.branching import GrpoPolicy, path_seed
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.rollout.context import RolloutContext
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tasks.tags.calls import RESULT_FRAME
from arpo_megatron.tree import Finish, Role, RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PROMPT, SEED, LocalEngine, arpo, grow, planned, sampled, texts
from tools_sandbox.client import ToolAnswer

Start = Callable[[ScriptedEngine], ScriptedEngine]
LAST = "<answer>1</answer>"


@pytest.mark.parametrize(
    ("written", "kept", "finish"),
    [
        ("<search>never closed", "<search>never closed\0", Finish.END),
        ("<python>print(1)</search>", "<python>print(1)</search>", Finish.MALFORMED),
        ("<search>a<python>1</python>", "<search>a<python>1</python>", Finish.MALFORMED),
        ("<search>a<search>b</search>", "<search>a<search>b</search>", Finish.MALFORMED),
        ("<python>1<python>2</python></python>", "<python>1<python>2</python>", Finish.MALFORMED),
        ("<search> \n\t</search>", "<search> \n\t</search>", Finish.MALFORMED),
        ("<python></python> and more", "<python></python>", Finish.MALFORMED),
        ("so </search>", "so </search>", Finish.MALFORMED),
        ("<think><search>idea</think></search>", "<think><search>idea</think></search>", Finish.MALFORMED),
    ],
)
def test_unusable_call_ends_the_trajectory(
    scripted_engine: Start, sandbox_url: str, written: str, kept: str, finish: Finish
) -> None:
    engine = scripted_engine(ScriptedEngine(planned(written)))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(1))
    assert texts(tree, tree.leaves()[0]) == [PROMPT, kept]
    assert tree.segments[1].finish is finish
    assert grower.counts.calls_executed == 0


@pytest.mark.parametrize(
    ("written", "kept", "code", "status"),
    [
        ("<python>1+1</python><search>x</search>", "<python>1+1</python>", "1+1", "ok"),
        ("<python>print('</python>')</python>", "<python>print('</python>", "print('", "error"),
        ("<think>I try <python>6*7</python>", "<think>I try <python>6*7</python>", "6*7", "ok"),
        ("<python>print('<search>x')</python>", "<python>print('<search>x')</python>", "print('<search>x')", "ok"),
    ],
)
def test_first_closing_tag_ends_a_call(
    scripted_engine: Start, sandbox_url: str, written: str, kept: str, code: str, status: str
) -> None:
    engine = scripted_engine(ScriptedEngine(planned(written, LAST)))
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1))
    assert texts(tree, 3)[1] == kept
    record = tree.segments[2].tool
    assert record is not None
    assert (dict(record.arguments), record.status) == ({"code": code}, status)
    assert tree.segments[3].finish is Finish.END


def test_tag_cut_by_the_token_limit_is_no_call(scripted_engine: Start, sandbox_url: str) -> None:
    written = "<python>1+1</python>"
    engine = scripted_engine(ScriptedEngine(planned(written, LAST)))
    for tokens in range(1, len(written)):
        tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(1), limits=replace(LIMITS, max_response_tokens=tokens))
        assert texts(tree, 1)[1] == written[:tokens]
        assert tree.segments[1].finish is Finish.LENGTH
        assert grower.counts.calls_executed == 0


PAGE = "\U000f0000"
"""One token of the engine below that stands for 4 KiB of program text."""
PAGE_TEXT = f"#{'x' * 4094}\n"


class PageCodec:
    """`CharacterCodec` with that token."""

    def encode(self, text: str) -> list[int]:
        return CODEC.encode(text)

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return CODEC.decode(token_ids).replace(PAGE, PAGE_TEXT)


def test_refused_call_continues_the_trajectory(scripted_engine: Start, sandbox_url: str) -> None:
    written = f"<python>{256 * PAGE}print(7)</python>"
    engine = scripted_engine(ScriptedEngine(planned(written, LAST)))
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1), codec=PageCodec())
    assert tree.segments[1].token_ids.tolist() == CODEC.encode(written)
    record = tree.segments[2].tool
    assert record is not None
    assert record.arguments["code"] == 256 * PAGE_TEXT + "print(7)"
    assert record.status == "error"
    assert "characters; at most" in texts(tree, 3)[2]
    assert tree.segments[3].finish is Finish.END


class ByteCodec:
    """Byte-level tokens as in GPT-2's and Qwen's vocabularies: the byte values, then pairs and triples of bytes."""

    def __init__(self) -> None:
        rng = random.Random(0)
        pieces = ["é", "→", "🙂", "</", "thon>", "<py", "search>", " </s", "1+", "ab", "\n\n"]
        longer = {piece.encode()[:3] for piece in pieces} | {bytes(rng.choices(range(256), k=2)) for _ in range(40)}
        self.words = [bytes([value]) for value in range(256)] + sorted(longer)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.words[token] for token in token_ids).decode(errors="replace")

    def cut(self, data: bytes, rng: random.Random) -> list[int]:
        """Draw a tokenization of `data`; tokens may end inside characters and tags."""
        tokens, start = [], 0
        while start < len(data):
            fits = [index for index, word in enumerate(self.words) if data.startswith(word, start)]
            tokens.append(rng.choice(fits))
            start += len(self.words[tokens[-1]])
        return tokens


BYTES = ByteCodec()
END = 0
CALLS = ["<python>1+1</python>", "<search>x</search>"]
TAGS = ["<search>", "</search>", "<python>", "</python>", "<think>", "</think>", "<answer>4</answer>", "</pyth", "<pyt"]
FRAGMENTS = st.sampled_from([*CALLS * 8, *TAGS, "é", "→🙂", " text ", "\n", "'"])


@dataclass
class ByteEngine(LocalEngine):
    """Answers as the real client does, in the same process: each path continues one stream of bytes."""

    texts: Sequence[bytes]
    """The texts to sample from; the seed of a request chooses one."""
    cut_short: float
    """Probability that a weight push cuts a request short."""
    returned: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Sampling seed -> tokens returned for it, in order."""
    asked: dict[int, list[int]] = field(default_factory=dict)
    """Sampling seed -> prefix of its first request."""
    version: int = 0

    async def generate(
        self, input_ids: Any, *, max_new_tokens: int, sampling: Sampling, ready: Any, stop: Sequence[str], **_rest: Any
    ) -> Generation:
        await ready()
        await asyncio.sleep(0)
        seed = sampling.seed
        assert seed is not None
        rng = random.Random(seed)
        stream = [*BYTES.cut(rng.choice(self.texts), rng), END]
        before = self.returned[seed]
        assert input_ids.tolist() == self.asked.setdefault(seed, input_ids.tolist()) + before
        ids, matched, finish = [], None, EngineFinish.LENGTH
        pushed = random.Random(len(before) + seed).random() < self.cut_short
        for token in stream[len(before) : len(before) + max_new_tokens]:
            if pushed and len(ids) == 2:
                self.version += 1
                finish = EngineFinish.CUT_SHORT
                break
            ids.append(token)
            if matched := protocol.find_stop(BYTES.decode(ids), stop):
                finish = EngineFinish.STOP_STRING
                break
            if token == END:
                finish = EngineFinish.END_TOKEN
                break
        before += ids
        version = self.version - (finish is EngineFinish.CUT_SHORT)
        return sampled(ids, finish, matched, len(input_ids), version)


class Echo:
    """A tool service that answers with the arguments of the call."""

    async def call(self, tool: str, arguments: dict[str, object], **_options: Any) -> ToolAnswer:
        await asyncio.sleep(0)
        return ToolAnswer(f"{tool}: {arguments}", "ok", 0.0, cached=False)


def chain(tree: RolloutTree, index: int) -> list[int]:
    """Return the tokens of a MODEL segment and its continuations by newer weights."""
    ids = tree.segments[index].token_ids.tolist()
    for below in tree.children()[index]:
        if tree.segments[below].role is Role.MODEL:
            ids += chain(tree, below)
    return ids


def places(tree: RolloutTree) -> dict[int, tuple[int, ...]]:
    """Return path keys by segment, for MODEL segments that are no continuations."""
    found: dict[int, tuple[int, ...]] = {}
    keys: dict[int, tuple[int, ...]] = {0: ()}
    for index, below in enumerate(tree.children()):
        for place, child in enumerate(below):
            going_on = tree.segments[index].role is Role.MODEL and tree.segments[child].role is Role.MODEL
            keys[child] = keys[index] if going_on else (*keys[index], place)
            if tree.segments[child].role is Role.MODEL and not going_on:
                found[child] = keys[child]
    return found


@settings(max_examples=50)
@given(
    streams=st.lists(st.lists(FRAGMENTS, min_size=1, max_size=6).map("".join), min_size=1, max_size=5),
    response=st.integers(1, 160) | st.just(400),
    k=st.integers(1, 12),
    cut_short=st.sampled_from([0.0, 0.3]),
    stop_at_answer=st.booleans(),
)
def test_tree_has_exactly_the_tokens_of_the_engine(
    streams: list[str], response: int, k: int, cut_short: float, stop_at_answer: bool
) -> None:
    engine: Any = ByteEngine([stream.encode() for stream in streams], cut_short)
    tools: Any = Echo()
    limits = RolloutLimits(500, response, 3, 60, 1.0, stop_at_answer)
    policy = arpo(6, 2, k=k, branch_probability=0.7)
    prompt = np.array(BYTES.encode(PROMPT), np.int32)
    context = RolloutContext(engine, tools, BYTES, policy, Sampling(), limits, SEED, 3, lambda _tokens: None)
    tree = asyncio.run(TreeGrower("task-1", prompt, context).grow())
    assert len(tree.leaves()) == 6
    held = {
        index: (tree.path_tokens(tree.segments[index].parent).tolist(), chain(tree, index)) for index in places(tree)
    }
    assert sorted(held.values()) == sorted((engine.asked[seed], engine.returned[seed]) for seed in engine.returned)
    for index, place in places(tree).items():
        if place[0] < policy.initial:  # the others, which forks became that were not used, follow in another order
            seed = path_seed(SEED, 3, "task-1", place)
            assert held[index] == (engine.asked[seed], engine.returned[seed])
    for index, segment in enumerate(tree.segments):
        if segment.role is Role.TOOL:
            assert segment.tool is not None
            answer = f"{segment.tool.name}: {dict(segment.tool.arguments)}"
            whole = BYTES.encode(RESULT_FRAME.text(answer))
            assert segment.token_ids.tolist() == whole or len(segment) <= 60
            assert tree.segments[segment.parent].finish is Finish.TOOL_CALL
        elif segment.role is Role.MODEL:
            below = [tree.segments[child].role for child in tree.children()[index]]
            assert (segment.finish is None) == (below == [Role.MODEL])
            assert (segment.finish is Finish.TOOL_CALL) == (below == [Role.TOOL])
            assert segment.logprobs is not None
            assert len(segment.logprobs) == len(segment)
    for leaf in tree.leaves():
        assert len(tree.path_tokens(leaf)) <= len(prompt) + response


def test_character_cut_by_the_token_limit_keeps_its_bytes() -> None:
    """For each limit on a text of two- to four-byte characters, the tokens are the first ones."""
    stream = "é→🙂é".encode()
    tools: Any = Echo()
    for tokens in range(1, len(stream)):
        engine: Any = ByteEngine([stream], 0.0)
        limits = RolloutLimits(500, tokens, 3, 60, 1.0)
        prompt = np.array(BYTES.encode(PROMPT), np.int32)
        context = RolloutContext(engine, tools, BYTES, GrpoPolicy(1), Sampling(), limits, SEED, 3, lambda _tokens: None)
        tree = asyncio.run(TreeGrower("task-1", prompt, context).grow())
        (ids,) = engine.returned.values()
        assert tree.segments[1].token_ids.tolist() == ids
        assert len(ids) <= tokens
        assert stream.startswith(b"".join(BYTES.words[token] for token in ids).removesuffix(b"\0"))
        assert tree.segments[1].finish is (Finish.END if ids[-1] == END else Finish.LENGTH)
