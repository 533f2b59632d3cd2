"""Trees grow with any call protocol: sampled tokens stay, and each result is inserted once."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from arpo_megatron.algorithms.branching import GrpoPolicy
from arpo_megatron.engine.function_calls import FunctionCall, ParsedTurn
from arpo_megatron.engine.template_protocol import TemplateProtocol
from arpo_megatron.tasks.protocols.base import INVALID_CALL, CallProtocol, ResultFrame
from arpo_megatron.tasks.protocols.hermes import HermesProtocol
from arpo_megatron.tree import Finish
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PROMPT, arpo, fork_points, grow, texts

Start = Callable[[ScriptedEngine], ScriptedEngine]
LAST = "<answer>\\boxed{4}</answer>"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*turns: str) -> Callable[[str], str]:
    """Return a script whose n-th turn follows the n-th result."""

    def follow(text: str) -> str:
        *answered, current = text.removeprefix(PROMPT).split("assistant\n")
        turn = turns[min(len(answered), len(turns) - 1)]
        assert turn.startswith(current)
        return turn[len(current) :]

    return follow


def test_hermes_tree_has_the_sampled_tokens_and_the_results(scripted_engine: Start, sandbox_url: str) -> None:
    turns = (f"<think>a</think>{call('python', code='2*2')}", call("pyton"), LAST)
    engine = scripted_engine(ScriptedEngine(script(*turns)))
    protocol = HermesProtocol()
    limits = replace(LIMITS, protocol=protocol, max_tool_tokens=400, max_response_tokens=900, max_length=1200)
    tree, grower = grow(engine.url, sandbox_url, arpo(2, 1, branch_probability=1.0), limits=limits)
    for leaf in tree.leaves():
        prompt, first, result, *rest = texts(tree, leaf)
        assert (prompt, first, result) == (PROMPT, turns[0], protocol.result_frame().text("4"))
        assert rest[-1] == LAST + "\0" and tree.segments[leaf].finish is Finish.END
    assert [each.tool.status for each in tree.segments if each.tool] == ["ok", INVALID_CALL, INVALID_CALL][
        : len(fork_points(tree))
    ]
    assert max(fork_points(tree)) == 2
    assert grower.counts.calls_executed == 1 and grower.counts.calls_invalid >= 1


def test_opened_call_that_never_ends_is_malformed(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(script("<tool_call>{")))
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1), limits=replace(LIMITS, protocol=HermesProtocol()))
    assert tree.segments[1].finish is Finish.MALFORMED


class Framed(TemplateProtocol):
    """The template protocol with a frame of its own, since the tokens of these tests are characters."""

    def result_frame(self) -> ResultFrame:
        return ResultFrame("[tool]", "[/tool]assistant\n")


def test_turn_of_a_chat_template_ends_with_its_own_token(scripted_engine: Start, sandbox_url: str) -> None:
    async def parse(text: str, _functions: Any, _parser: str) -> ParsedTurn:
        found = text.startswith("CALL ")
        return ParsedTurn("" if found else text, (FunctionCall("python", text[5:]),) if found else ())

    first = 'CALL {"code": "1+1"}'

    def follow(text: str) -> str:
        return LAST if text.endswith("assistant\n") else first

    engine = scripted_engine(ScriptedEngine(follow))
    protocol: CallProtocol = Framed(parser="x", parse=parse)
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1), limits=replace(LIMITS, protocol=protocol))
    assert texts(tree, tree.leaves()[0]) == [PROMPT, f"{first}\0", "[tool]2[/tool]assistant\n", f"{LAST}\0"]
    assert tree.segments[1].finish is Finish.TOOL_CALL and "stop" not in engine.requests[0]["sampling_params"]
    assert CODEC.decode(tree.trajectory(3).token_ids.tolist()).endswith(f"{LAST}\0")
