"""The trained tokens of a conversation: for every style of chat template exactly those that the model would sample."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arpo_megatron.models.tiny import train_bpe
from arpo_megatron.tasks.sft.chat_template import ChatEncoder
from arpo_megatron.tasks.sft.dataset import conversation_tree, read_conversations
from arpo_megatron.tasks.sft.rows import check_row
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.table_reader import BadRowError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN_THINKING = (  # an empty thinking block in the last turn only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "{% if loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% elif m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ENDS = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", MARKED: "<|im_end|>", MARKED_WITHOUT_END: "<|im_end|>"}
STYLES = {"chatml": CHATML, "llama3": LLAMA3, "marked": MARKED, "marked without end": MARKED_WITHOUT_END}
WORDS = "the quick brown fox looks things up and answers: 42\n\n  indented\n"


WORDS_REGEX = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen and Llama 3 divide text (the contractions left out)."""


def make(template: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE with merges, with the marks of all templates as special tokens and tool tags as plain
    ones.
    """
    tokenizer = train_bpe([WORDS] * 20, 500)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {template: make(template) for template in (*ENDS, QWEN_TOOLS, QWEN_THINKING, NO_END)}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def tree_of(template: str, messages: list[dict[str, Any]], **row: Any) -> RolloutTree:
    return conversation_tree({"messages": messages, **row}, ChatEncoder(TOKENIZERS[template]), 10**6)


def learnt(template: str, messages: list[dict[str, Any]], **row: Any) -> list[str]:
    tree = tree_of(template, messages, **row)
    return [TOKENIZERS[template].decode(s.token_ids) for s in tree.segments if s.role is Role.MODEL]


def whole(template: str, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    made = TOKENIZERS[template].apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)
    return list(made["input_ids"])


text = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x24F, exclude_characters="<|>"), min_size=1, max_size=6
).filter(lambda text: text == text.strip())
turns = st.lists(st.tuples(text, st.booleans(), text), min_size=1, max_size=4)


@pytest.mark.parametrize("style", STYLES)
@given(turns=turns)
def test_trained_tokens_are_each_trained_answer_with_its_end(style: str, turns: list[tuple[str, bool, str]]) -> None:
    template = STYLES[style]
    turns = [*turns, ("bye", True, "bye")]
    messages = [turn("system", "be brief")]
    for question, trained, answer in turns:
        messages += [turn("user", question), turn("assistant", answer, **({} if trained else {"train": False}))]
    tree = tree_of(template, messages)
    assert learnt(template, messages) == [answer + ENDS[template] for _, trained, answer in turns if trained]
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    tokens = tree.path_tokens(tree.leaves()[0]).tolist()
    assert tokens == whole(template, plain)[: len(tokens)]
    assert tree.segments[0].role is Role.PROMPT
    assert tree.segments[-1].role is Role.MODEL, "nothing that no token attends to is computed"


def test_tool_calls_are_trained_and_their_results_are_not() -> None:
    call = {"type": "function", "function": {"name": "python", "arguments": '{"code": "6*7"}'}}
    messages = [
        turn("system", "be brief"),
        turn("user", "6*7?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        turn("tool", "42"),
        turn("tool", ""),
        turn("assistant", "42"),
        turn("user", "thanks"),
    ]
    tools = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}]
    shown = '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call><|im_end|>'
    for given_tools in (tools, json.dumps(tools)):
        tree = tree_of(QWEN_TOOLS, messages, tools=given_tools)
        assert learnt(QWEN_TOOLS, messages, tools=given_tools) == [shown, "42<|im_end|>"]
        tokens = tree.path_tokens(tree.leaves()[0]).tolist()
        plain = [dict(message) for message in messages]
        plain[2] = turn(
            "assistant", "", tool_calls=[{**call, "function": {"name": "python", "arguments": {"code": "6*7"}}}]
        )
        assert tokens == whole(QWEN_TOOLS, plain, tools)[: len(tokens)]
        assert [s.role for s in tree.segments] == [Role.PROMPT, Role.MODEL, Role.TOOL, Role.MODEL]


def test_empty_thinking_block_of_the_last_turn_is_accepted() -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert learnt(QWEN_THINKING, messages) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


def test_template_that_drops_reasoning_makes_a_bad_row() -> None:
    messages = [
        turn("user", "a"),
        turn("assistant", "b", reasoning_content="hm"),
        turn("user", "c"),
        turn("assistant", "d"),
    ]
    with pytest.raises(BadRowError, match="differently in the whole"):
        tree_of(QWEN_THINKING, messages)
    assert learnt(QWEN_THINKING, [messages[0], {**messages[1], "train": False}, *messages[2:]])[0].endswith(
        "d<|im_end|>"
    )


def test_last_character_of_several_tokens_is_trained_completely() -> None:
    for template in ENDS:
        assert learnt(template, [turn("user", "a"), turn("assistant", "done \U0001f600")])[0].startswith(
            "done \U0001f600"
        )


def test_turn_that_shares_a_token_with_its_prompt_is_refused() -> None:
    tokenizer = make(LLAMA3)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # With GPT-2's splitting, two line breaks are one token at the end of a prompt, and two before a word.
    with pytest.raises(BadRowError, match="the tokenizer joins the beginning of message 1"):
        conversation_tree({"messages": [turn("user", "a"), turn("assistant", "yes")]}, ChatEncoder(tokenizer), 100)


def test_whole_turn_is_trained_without_an_end_token() -> None:
    assert learnt(NO_END, [turn("user", "a"), turn("assistant", "<think>x</think>the answer")]) == [
        "<think>x</think>the answer\n"
    ]


def test_weight_and_train_are_equivalent() -> None:
    for mark in ({"weight": 0}, {"train": False}):
        messages = [turn("user", "a"), turn("assistant", "no", **mark), turn("user", "b"), turn("assistant", "yes")]
        for template, end in ENDS.items():
            assert learnt(template, messages) == ["yes" + end]
    assert learnt(CHATML, [turn("user", "a"), turn("assistant", "yes", weight=1)]) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "an empty list of messages"),
        ([turn("user", "a"), turn("assistant", " ")], "message 1 has no content"),
        ([turn("user", ""), turn("assistant", "b")], "message 0 has no content"),
        ([turn("user", "a"), turn("system", "b"), turn("assistant", "c")], "a system message comes first"),
        ([turn("user", "a", tool_calls=[]), turn("assistant", "b")], "a user message with tool_calls"),
        ([turn("user", "a"), turn("assistant", "b", weight=0.5)], "neither true nor false"),
        ([turn("user", "a"), turn("assistant", "b", train=False)], "no assistant turn to learn"),
        ([turn("user", "a"), turn("assistant", "", tool_calls=[{"function": {}}])], "a tool call without a name"),
        (
            [turn("user", "a"), turn("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            "the arguments of f are not JSON",
        ),
        ([turn("user", [{"type": "image"}]), turn("assistant", "b")], "the content is not text"),
    ],
)
def test_unusable_message_gives_a_reason(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        check_row({"messages": messages})


@pytest.mark.parametrize("template", ["{{ raise_exception('') }}", "{{ messages[0].x.y }}", "{{ 1 / 0 }}"])
def test_template_errors_are_bad_rows(template: str) -> None:
    with pytest.raises(BadRowError, match="the chat template refuses"):
        ChatEncoder(make(template)).encode(check_row({"messages": [turn("user", "a"), turn("assistant", "b")]}))


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]
    assert learnt(CHATML, [turn("user", "a"), {"role": "assistant", "content": parts}]) == ["the answer<|im_end|>"]


def test_parquet_nulls_of_other_rows_fields_are_removed(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": "1"}}}
    rows = [
        {"messages": [turn("user", "a"), turn("assistant", "b")]},
        {
            "messages": [
                turn("user", "a"),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                turn("tool", "1"),
            ]
        },
        {
            "messages": [
                turn("user", "a"),
                turn("assistant", "b"),
                turn("user", "c"),
                turn("assistant", "d", train=False),
            ]
        },
    ]
    path = tmp_path / "talks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    read = read_conversations(path, TOKENIZERS[QWEN_TOOLS], 1000)
    assert not read.bad_rows
    found = [[s.role for s in tree.segments] for tree in read.trees]
    assert found == [[Role.PROMPT, Role.MODEL]] * 3


def test_json_array_and_blank_lines_are_read(tmp_path: Path) -> None:
    row = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    (tmp_path / "talks.json").write_text(json.dumps([row, row]))
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(row)}\n\n{json.dumps(row)}\n")
    for name in ("talks.json", "talks.jsonl"):
        assert len(read_conversations(tmp_path / name, TOKENIZERS[CHATML], 1000).trees) == 2


def test_token_beyond_the_embedding_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    rows = [{"messages": [turn("user", "a"), turn("assistant", "b")]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = len(TOKENIZERS[CHATML])
    assert not read_conversations(path, TOKENIZERS[CHATML], 1000, vocabulary=vocabulary).bad_rows
    with pytest.raises(Exception, match="beyond the model's vocabulary"):
        read_conversations(path, TOKENIZERS[CHATML], 1000, vocabulary=10)


@given(count=st.integers(2, 60), share=st.floats(0, 0.9), seed=st.integers(0, 99))
def test_split_is_complete_disjoint_and_seeded(count: int, share: float, seed: int) -> None:
    from arpo_megatron.tasks.sft.dataset import Conversations

    trees = tuple(RolloutTree(str(index), [1]) for index in range(count))
    talks = Conversations(trees, ())
    if share and max(1, round(share * count)) >= count:
        return
    train, held_out = talks.split(share, seed)
    assert bool(held_out) == bool(share)
    assert sorted(int(tree.task_id) for tree in [*train, *held_out]) == list(range(count))
    assert talks.split(share, seed)[1] == held_out
