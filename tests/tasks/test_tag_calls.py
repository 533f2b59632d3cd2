"""The tag protocol accepts any text of a model, and never cuts the tags of a result."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.tasks.protocols.base import Malformed, ToolCall
from arpo_megatron.tasks.tags.calls import (
    ANSWER_STOP,
    RESULT_FRAME,
    STOP_STRINGS,
    ends_inside_stop,
    find_stop,
    parse_call,
)


class ByteCodec:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


CODEC = ByteCodec()


@pytest.mark.parametrize(
    ("text", "stop", "call"),
    [
        ("<search> capital of France </search>", "</search>", ToolCall("search", {"query": "capital of France"})),
        ("<python>\nprint(1)\n</python>", "</python>", ToolCall("python", {"code": "\nprint(1)\n"})),
        ("<think>plan</think> <python>1+1</python>", "</python>", ToolCall("python", {"code": "1+1"})),
        ("<think>a <search> would do</think><python>2</python>", "</python>", ToolCall("python", {"code": "2"})),
        ("<python>print('<search>')</python>", "</python>", ToolCall("python", {"code": "print('<search>')"})),
        ("<python>print('</think>')</python>", "</python>", ToolCall("python", {"code": "print('</think>')"})),
        (
            "<think>a</think><python>'</think><search>'</python>",
            "</python>",
            ToolCall("python", {"code": "'</think><search>'"}),
        ),
        ("a <python> b</think> c</think><python>d</python>", "</python>", ToolCall("python", {"code": "d"})),
        ("<search>x</search>\n", "</search>", ToolCall("search", {"query": "x"})),
        ("rest of a thought</think><search>y</search>", "</search>", ToolCall("search", {"query": "y"})),
    ],
)
def test_usable_calls_are_read(text: str, stop: str, call: ToolCall) -> None:
    assert parse_call(text, stop) == call


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("no call </search>", "</search>"),
        ("<search> \n </search>", "</search>"),
        ("<python></python>", "</python>"),
        ("<search>a<search>b</search>", "</search>"),
        ("<python>1</search>", "</search>"),
        ("<search>a <python>1</python>", "</python>"),
        ("<think><search>idea</think></search>", "</search>"),
        ("<think>a</think><think><python>print(1)</think></python>", "</python>"),
        ("", "</python>"),
    ],
)
def test_unusable_calls_are_malformed_with_a_reason(text: str, stop: str) -> None:
    outcome = parse_call(text, stop)
    assert isinstance(outcome, Malformed)
    assert outcome.reason


@given(st.text(), st.sampled_from(STOP_STRINGS))
def test_any_text_has_a_defined_outcome(text: str, stop: str) -> None:
    outcome = parse_call(text + stop, stop)
    assert isinstance(outcome, ToolCall | Malformed)
    if isinstance(outcome, ToolCall):
        assert outcome.tool == stop[2:-1]
        assert all(value.strip() for value in outcome.arguments.values())


@given(st.text(), st.sampled_from(STOP_STRINGS), st.integers(1, 8))
def test_cut_within_a_stop_string_is_noticed(text: str, stop: str, length: int) -> None:
    assert ends_inside_stop(text + stop[:length])
    assert find_stop(text + stop) is not None


def test_complete_stop_string_is_not_a_cut_one() -> None:
    assert not ends_inside_stop("<search>x</search>")
    assert not ends_inside_stop("")
    assert find_stop("a</python>b</search>") == "</python>"
    assert find_stop("plain") is None


@given(st.text(max_size=200), st.integers(len(CODEC.encode(RESULT_FRAME.text(""))), 120))
def test_result_keeps_its_tags_within_the_limit(text: str, limit: int) -> None:
    ids = RESULT_FRAME.tokens(text, CODEC, limit)
    whole = CODEC.encode(RESULT_FRAME.text(text))
    assert len(ids) <= max(limit, 0)
    assert CODEC.decode(ids).startswith(" <result>\n")
    assert CODEC.decode(ids).endswith("\n</result>")
    if len(whole) <= limit:
        assert ids == whole
    else:
        assert text.startswith(CODEC.decode(ids)[len(" <result>\n") : -len("\n</result>")])


def test_half_a_character_of_a_page_is_replaced() -> None:
    ids = RESULT_FRAME.tokens("nice \ud83d cut", CODEC, 100)
    assert CODEC.decode(ids) == RESULT_FRAME.text("nice \ufffd cut")


def test_limit_below_the_tags_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_tool_tokens=5"):
        RESULT_FRAME.tokens("x" * 50, CODEC, 5)


def test_answer_stops_only_if_configured() -> None:
    stops = (*STOP_STRINGS, ANSWER_STOP)
    assert find_stop("<answer>1</answer>") is None
    assert find_stop("<answer>1</answer>", stops) == ANSWER_STOP
    assert not ends_inside_stop("<answer>1</ans")
    assert ends_inside_stop("<answer>1</ans", stops)
