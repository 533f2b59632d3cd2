"""Tokenizers decode to the encoded text and survive a model directory."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from arpo_megatron.config import ModelConfig
from arpo_megatron.models.tiny import PROTOCOL_TAGS, generated_tokenizer, make_model_directory, train_bpe

TRAJECTORY = (
    "question: qzlf+34 ?<think>look up</think><search>qzlf</search> <result>\nPage 1: qzlf 417\n</result>"
    "<think>calculate</think><python>417+34</python> <result>\n451\n</result><answer>\\boxed{451}</answer>"
)
GENERATED = generated_tokenizer()
BPE = train_bpe([TRAJECTORY, "The quick brown fox jumps over the lazy dog. "] * 20, 400)
BOTH = [GENERATED, BPE]

protocol_text = st.lists(
    st.one_of(
        st.sampled_from([*PROTOCOL_TAGS, "question: ", "Page 1: ", "No results found.", " ?", "  ", "\n"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8),
    ),
    max_size=12,
).map("".join)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@given(protocol_text)
def test_printable_text_round_trips(text: str) -> None:
    for tokenizer in BOTH:
        assert tokenizer.decode(encode(tokenizer, text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bpe_round_trips_any_text(text: str) -> None:
    assert BPE.decode(encode(BPE, text)) == text


@pytest.mark.parametrize("tokenizer", BOTH)
@pytest.mark.parametrize("tag", PROTOCOL_TAGS)
def test_protocol_tag_is_one_token_in_any_context(tokenizer: PreTrainedTokenizerFast, tag: str) -> None:
    number = tokenizer.convert_tokens_to_ids(tag)
    assert encode(tokenizer, tag) == [number]
    for before, after in (("a", "b"), (" ", " "), ("\n", "\n"), ("1", "}")):
        assert encode(tokenizer, before + tag + after).count(number) == 1
    assert tokenizer.decode([number], skip_special_tokens=True) == tag  # not special: never skipped


def test_segments_encoded_separately_join_to_the_whole() -> None:
    cuts = [TRAJECTORY.index(part) for part in (" <result>", "<think>calculate")]
    pieces = [TRAJECTORY[: cuts[0]], TRAJECTORY[cuts[0] : cuts[1]], TRAJECTORY[cuts[1] :]]
    for tokenizer in BOTH:
        joined = [token for piece in pieces for token in encode(tokenizer, piece)]
        assert tokenizer.decode(joined) == TRAJECTORY


def test_no_special_token_is_added() -> None:
    for tokenizer in BOTH:
        assert tokenizer.encode("12") == encode(tokenizer, "12")
        assert tokenizer.eos_token_id is not None
        assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_unknown_characters_become_unk() -> None:
    assert encode(GENERATED, "é") == [GENERATED.unk_token_id]
    assert len(encode(GENERATED, TRAJECTORY)) == 58


@pytest.mark.parametrize("tokenizer", BOTH)
def test_ids_have_a_text_and_vocabulary_divides_by_eight(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) % 8 == 0
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert None not in tokens
    assert len(set(tokens)) == len(tokens)


def test_bpe_respects_its_size_and_splits_numbers_into_digits() -> None:
    assert len(BPE) <= 400
    assert len(encode(BPE, "12345")) == 5
    with pytest.raises(ValueError, match="at least"):
        train_bpe(["text"], 256)


@pytest.mark.parametrize("tokenizer", BOTH)
def test_model_directory_loads_again(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = ModelConfig(hidden_size=48, layers=2, heads=4, kv_heads=2, ffn_size=64, max_length=128, dtype="float32")
    make_model_directory(tmp_path / "model", model, tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert encode(loaded, TRAJECTORY) == encode(tokenizer, TRAJECTORY)
    assert loaded.decode(encode(loaded, TRAJECTORY)) == TRAJECTORY
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.architectures == ["Qwen3ForCausalLM"]
    shape = (
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.head_dim,
        config.num_key_value_heads,
    )
    assert shape == (len(tokenizer), 48, 2, 12, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.eos_token_id == tokenizer.eos_token_id
    assert (
        json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == config.eos_token_id
    )
