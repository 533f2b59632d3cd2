"""Tools of the user are called by tags of their names, with a text or with a JSON object."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.protocols.base import InvalidCall, Malformed, ToolCall
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition, select_tools
from arpo_megatron.tasks.tags.calls import parse_call
from arpo_megatron.tasks.tags.response import parse_response

TEXT = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
PAIR = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def offered(**schemas: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"name": name, "description": f"It is {name}.", "arguments": each} for name, each in schemas.items()}


TOOLS = select_tools(["count_words", "add"], offered(count_words=TEXT, add=PAIR, python={}))
ADD = TOOLS[1]


@pytest.mark.parametrize(
    ("schema", "argument"),
    [
        (TEXT, "text"),
        ({**TEXT, "properties": {**TEXT["properties"], "k": {"type": "integer"}}}, "text"),  # type: ignore[dict-item]
        (PAIR, None),
        ({"properties": {"text": {"type": "string"}}}, None),
        ({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, None),
        ({"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}, None),
        ({}, None),
    ],
)
def test_only_required_text_is_the_text_of_the_tag(schema: dict[str, Any], argument: str | None) -> None:
    assert select_tools(["tool"], offered(tool=schema)) == (ToolDefinition("tool", argument, "It is tool.", schema),)


def test_unknown_tool_is_refused_with_those_on_offer() -> None:
    with pytest.raises(UserError, match=r"does not offer 'cuont_words'; it offers add, count_words$"):
        select_tools(["cuont_words"], offered(count_words=TEXT, add=PAIR))


@pytest.mark.parametrize(
    ("text", "stop", "call"),
    [
        ("<count_words> a b </count_words>", "</count_words>", ToolCall("count_words", {"text": "a b"})),
        ('<think>.</think><add>{"a": 1, "b": 2}</add>', "</add>", ToolCall("add", {"a": 1, "b": 2})),
        ("<add> \n</add>", "</add>", ToolCall("add", {})),
        ("<count_words> </count_words>", "</count_words>", Malformed("empty <count_words>")),
        ("<add>1</count_words>", "</count_words>", Malformed("</count_words> without <count_words>")),
    ],
)
def test_calls_are_read(text: str, stop: str, call: ToolCall | Malformed) -> None:
    outcome = parse_call(text, stop, TOOLS)
    assert isinstance(outcome, Malformed) if isinstance(call, Malformed) else outcome == call


@pytest.mark.parametrize(
    "content",
    [
        *('{"a": 1', "[1, 2]", "3", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\ud800": 1}'),
        *('{"a": 9223372036854775808}', '{"a": ' + "9" * 5000 + "}", '{"a":' * 40 + "1" + "}" * 40, "[" * 100_000),
    ],
    ids=lambda content: content[:20],
)
def test_text_that_is_no_json_object_becomes_an_error_result(content: str) -> None:
    outcome = parse_call(f"<add>{content}</add>", "</add>", TOOLS)
    assert isinstance(outcome, InvalidCall)
    assert "<add>" in outcome.result
    outcome.result.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), JSON, max_size=3).map(json.dumps) | st.text())
def test_arguments_of_any_call_can_be_sent_and_stored(content: str) -> None:
    outcome = parse_call(f"<add>{content}</add>", ADD.stop, TOOLS)
    if isinstance(outcome, ToolCall):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome.arguments)) == outcome.arguments


def test_response_knows_the_tags_of_the_job_only() -> None:
    text = "<think>.</think><add>{}</add> <result>\n3\n</result><answer>\\boxed{3}</answer>"
    assert parse_response(text, ["add"]).tools == {"add"}
    assert parse_response(text).reason == "<result> without a call"
    assert [tool.stop for tool in DEFAULT_TOOLS] == ["</search>", "</python>"]
