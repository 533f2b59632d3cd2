"""Conversations become paths with the exact tokens of the chat template; those of the assistant are trained."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.sft.chat_template import ChatEncoder
from arpo_megatron.tasks.sft.dataset import conversation_tree, draw_batch, read_conversations
from arpo_megatron.tree import Role
from arpo_megatron.utils.table_reader import BadRowError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|bos|>{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m['content'] }}"
    "<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)
REWRITING = (  # keeps thoughts in the last turn only, as Qwen3's template does
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = {CHATML: "<|im_end|>", LLAMA: "<|eot|>", MARKED: "<|im_end|>"}


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes as tokens and the marks of all templates as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|end|>", "<|eot|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=marks)
    tokenizer.chat_template = template
    return tokenizer


def turn(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


TALK = [
    turn("system", "be brief"),
    turn("user", "2+2?"),
    turn("assistant", "<python>2+2</python>"),
    turn("tool", "4"),
    turn("assistant", "4"),
    turn("user", "thanks"),
]


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED])
def test_only_assistant_tokens_are_trained(template: str) -> None:
    tokenizer = tokenizer_with(template)
    tree = conversation_tree({"messages": TALK}, ChatEncoder(tokenizer), 1000)
    trajectory = tree.trajectory(tree.leaves()[0])
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert trajectory.token_ids.tolist() == whole[: len(trajectory.token_ids)]
    learnt = [tokenizer.decode(s.token_ids) for s in tree.segments if s.role is Role.MODEL]
    assert learnt == [f"<python>2+2</python>{END[template]}", f"4{END[template]}"]
    assert tree.segments[0].role is Role.PROMPT and tree.segments[2].role is Role.TOOL


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=12)), max_size=6),
    template=st.sampled_from([CHATML, MARKED]),
)
def test_any_conversation_is_a_prefix_of_the_rendered_one(turns: list[tuple[str, str]], template: str) -> None:
    messages = [turn("system", "x"), *(turn(role, "x" + text) for role, text in turns), turn("assistant", "end")]
    tokenizer = tokenizer_with(template)
    tree = conversation_tree({"messages": messages}, ChatEncoder(tokenizer), 10**6)
    trajectory = tree.trajectory(tree.leaves()[0])
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert trajectory.token_ids.tolist() == whole[: len(trajectory.token_ids)]
    turns_learnt = sum(role == "assistant" for role, _ in turns) + 1
    assert sum(segment.role is Role.MODEL for segment in tree.segments) == turns_learnt


def test_untrained_turn_is_context() -> None:
    messages = [*TALK[:2], turn("assistant", "wrong", train=False), TALK[3], TALK[4]]
    for template in (CHATML, MARKED):
        tree = conversation_tree({"messages": messages}, ChatEncoder(tokenizer_with(template)), 1000)
        assert [s.role for s in tree.segments] == [Role.PROMPT, Role.MODEL]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, 'no "messages" or'),
        ({"messages": [turn("robot", "x")]}, "message 0 has no role"),
        ({"messages": [{"role": "user"}]}, "message 0 has no content"),
        ({"messages": [turn("user", "x")]}, "no assistant turn to learn"),
        ({"messages": [turn("user", "x" * 200), turn("assistant", "y")]}, "more than 100"),
        ({"messages": [turn("user", "x"), turn("assistant", "y", train="no")]}, "neither true nor false"),
    ],
)
def test_unusable_row_gives_a_reason(row: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation_tree(row, ChatEncoder(tokenizer_with(CHATML)), 100)


def test_template_that_rewrites_earlier_turns_makes_a_bad_row() -> None:
    messages = [turn("user", "a"), turn("assistant", "hm</think>b"), turn("user", "c"), turn("assistant", "d")]
    with pytest.raises(ValueError, match="renders the turns before message"):
        conversation_tree({"messages": messages}, ChatEncoder(tokenizer_with(REWRITING)), 1000)
    assert (
        len(conversation_tree({"messages": messages[:2]}, ChatEncoder(tokenizer_with(REWRITING)), 1000).segments) == 2
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bad_rows_are_counted_and_named(tmp_path: Path, kind: str) -> None:
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[:3]}]
    path = tmp_path / f"talks.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n" + "[" * 10**5 + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    read = read_conversations(path, tokenizer_with(CHATML), 1000)
    assert len(read.trees) == 2
    assert [row.row for row in read.bad_rows] == ([1, 3, 4] if kind == "jsonl" else [1])


def test_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    with pytest.raises(UserError, match="no such file"):
        read_conversations(path, tokenizer_with(CHATML), 100)
    path.write_text("{}\n")
    with pytest.raises(UserError, match="chat template"):
        read_conversations(path, tokenizer_with(None), 100)
    with pytest.raises(UserError, match="none of its 1 rows"):
        read_conversations(path, tokenizer_with(CHATML), 100)
    with pytest.raises(UserError, match="are read from"):
        read_conversations(tmp_path / "talks.txt", tokenizer_with(CHATML), 100)


@given(count=st.integers(1, 9), size=st.integers(1, 7), seed=st.integers(0, 99))
def test_epochs_hold_every_conversation_once(count: int, size: int, seed: int) -> None:
    drawn = [item for update in range(3 * count) for item in draw_batch(range(count), size, seed=seed, update=update)]
    for epoch in range(len(drawn) // count):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_sharegpt_row_equals_its_messages() -> None:
    talk = [turn("system", "be brief"), turn("user", "2+2?"), turn("assistant", "4")]
    names = {"user": "human", "assistant": "gpt"}
    given = [{"from": names[str(each["role"])], "value": each["content"]} for each in talk[1:]]
    encoder = ChatEncoder(tokenizer_with(CHATML))
    expected = conversation_tree({"messages": talk}, encoder, 1000).to_dict()
    assert conversation_tree({"conversations": given, "system": "be brief"}, encoder, 1000).to_dict() == expected
    inside = [{"from": "system", "value": "be brief"}, *given]
    assert conversation_tree({"conversations": inside, "system": ""}, encoder, 1000).to_dict() == expected
    with pytest.raises(BadRowError, match="message 0 has no role of"):
        conversation_tree({"conversations": [{"from": "bing", "value": "x"}]}, encoder, 1000)
