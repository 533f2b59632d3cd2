"""Random models that call tools by chance: whole tool calls are single tokens of their vocabulary.

Its logits are nearly level, so the length of a segment is geometric with a known mean, and nothing has to be trained.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arpo_megatron.weights.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

WORDS = 896
CALLS = 64
"""One token in (WORDS + CALLS) / CALLS is a call."""


def random_qwen3(vocabulary: int, *, eos: int, pad: int, positions: int, spread: float) -> "Qwen3ForCausalLM":
    """Two layers of width 64 in float32; `spread` is the standard deviation of its weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=0,
        initializer_range=spread,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).float()
    return model


def write_model(folder: Path) -> None:
    """A Hugging Face directory with such a model, and a tokenizer of one token a word."""
    calls = [f"<python>{number}+{number}</python>" for number in range(CALLS)]
    fast = _tokenizer(WORDS, calls)
    random_qwen3(len(fast), eos=0, pad=1, positions=4096, spread=0.02).save_pretrained(folder)
    fast.save_pretrained(folder)


def write_large_model(folder: Path, shape: ModelShape, *, dtype: str, segment: int, result: int) -> None:
    """The same in the shape of a real Qwen3, without its weights (`weights/random_init.py` draws them).

    Args:
        folder: is made.
        shape: of a Qwen3.
        dtype: of the weights.
        segment: mean tokens of what it writes up to a call.
        result: tokens of what the call answers, about.
    """
    calls = [f"<python>print(' w{number}' * {result})</python>" for number in range(round(shape.vocabulary / segment))]
    words = shape.vocabulary - len(calls) - len(_tokenizer(0, []))
    _tokenizer(words, calls).save_pretrained(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _tokenizer(words: int, calls: Sequence[str]) -> "PreTrainedTokenizerFast":
    """One token a word, a call and a sign of the protocol; the end of the sequence is token 0, padding 1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<eos>", "<pad>", "<unk>", *" <>/\n", "result", "42"]
    tokens = [*specials, *(f" w{number}" for number in range(words)), *calls]
    vocabulary = {word: index for index, word in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" w\d+|[ <>/\n]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
