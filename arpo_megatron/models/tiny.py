"""Tokenizers for models made here, and the Hugging Face directory such a model starts from.

Both tokenizers keep each tag of the tool protocol as one token, so that a tool call ends on a token boundary, and
decode to exactly the encoded text. A model from the Hugging Face hub has its own tokenizer.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from arpo_megatron.config import ModelConfig
from arpo_megatron.models.spec import SPARE_POSITIONS

if TYPE_CHECKING:  # transformers imports torch, which the command line does without
    from transformers import PreTrainedTokenizerFast

PROTOCOL_TAGS = (
    *("<think>", "</think>", "<search>", "</search>", "<python>", "</python>"),
    *("<result>", "</result>", "<answer>", "</answer>", "\\boxed{"),
)
CHAT_TAGS = ("<|im_start|>", "<|im_end|>")

_WORDS = ("question: ", "Page 1: ", "No results found.", "look up", "calculate", "Error: ", " ?")
_CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
_VOCABULARY_MULTIPLE = 8  # tensor parallelism divides the vocabulary


def generated_tokenizer() -> "PreTrainedTokenizerFast":
    """Make the tokenizer of the generated tasks: protocol tags, a few whole words, and single ASCII characters.

    A trajectory takes about 35 tokens. `decode(encode(text)) == text` for printable ASCII; other characters become
    <unk>.
    """
    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *_WORDS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (no password)
    words = "|".join(re.escape(word) for word in _WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made = _finish(tokenizer, eos="<eos>", pad="<pad>", unk="<unk>")
    made.chat_template = "question: {{ messages[-1]['content'].rstrip(' ?') }} ?"
    return made


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer that can encode any text and splits numbers into digits.

    Args:
        texts: texts to learn merges from; protocol tags in them are ignored.
        vocabulary_size: upper bound on the vocabulary, tags and special tokens included; the result is a multiple of 8.

    Raises:
        ValueError: the vocabulary is too small for all bytes and tags.
    """
    reserved = len(PROTOCOL_TAGS) + len(CHAT_TAGS) + 1
    smallest = -(-(256 + reserved) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if vocabulary_size < smallest:
        raise ValueError(f"vocabulary_size={vocabulary_size}: 256 bytes and {reserved} tags need at least {smallest}")
    learned = vocabulary_size // _VOCABULARY_MULTIPLE * _VOCABULARY_MULTIPLE - reserved
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=learned, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tags = re.compile("|".join(re.escape(tag) for tag in (*PROTOCOL_TAGS, *CHAT_TAGS)))
    tokenizer.train_from_iterator((tags.sub(" ", text) for text in texts), trainer)
    return _finish(tokenizer, eos="<|im_end|>", pad="<|endoftext|>", special=("<|im_start|>",))


def _finish(
    tokenizer: Tokenizer, *, eos: str, pad: str, unk: str | None = None, special: tuple[str, ...] = ()
) -> "PreTrainedTokenizerFast":
    """Add the protocol tags, pad the vocabulary to the multiple, and wrap the tokenizer for transformers and SGLang."""
    from transformers import PreTrainedTokenizerFast

    names = [name for name in (pad, eos, unk, *special) if name is not None]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in PROTOCOL_TAGS])
    missing = -tokenizer.get_vocab_size() % _VOCABULARY_MULTIPLE
    # Every id that the model can sample needs a text; the fillers have no other use.
    fillers = [AddedToken(f"<|unused{index}|>", special=True, normalized=False) for index in range(missing)]
    tokenizer.add_special_tokens(fillers)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=pad,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )


def make_model_directory(directory: Path, model: ModelConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Write config.json, generation_config.json and the tokenizer of a Qwen3 model of these sizes, without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    _write_json(directory / "config.json", _qwen3_config(model, tokenizer))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_json(directory / "generation_config.json", {**ends, "do_sample": True, "temperature": 1.0})


def _qwen3_config(model: ModelConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.hidden_size // model.heads,
        "max_position_embeddings": model.max_length + SPARE_POSITIONS,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": model.dtype,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
