"""Random models that call tools by chance: whole tool calls are single tokens of their vocabulary.

Their logits are nearly uniform, so segment lengths are geometric with a known mean, without any training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

WORDS = 896
CALLS = 64
"""Call tokens: one sampled token in (WORDS + CALLS) / CALLS is a call."""
_SPECIALS = ("<eos>", "<pad>", "<unk>", *" <>/\n", "result", "42")
OTHERS = len(_SPECIALS)
"""Number of tokens that are neither words nor calls."""


def random_qwen3(vocabulary: int, *, eos: int, pad: int, positions: int, spread: float) -> "Qwen3ForCausalLM":
    """Return a model of two layers and width 64 in float32; `spread` is the standard deviation of its weights."""
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
    """Write a Hugging Face directory with such a model and its tokenizer."""
    tokenizer = tool_calling_tokenizer(WORDS, sums(CALLS))
    random_qwen3(len(tokenizer), eos=0, pad=1, positions=4096, spread=0.02).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sums(count: int) -> list[str]:
    """Return `count` different calls of the tool `python`, each a sum."""
    return [f"<python>{number}+{number}</python>" for number in range(count)]


def tool_calling_tokenizer(words: int, calls: Sequence[str]) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per word (" w0", " w1", ...) and per call; 0 is EOS, 1 is padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIALS, *(f" w{number}" for number in range(words)), *calls]
    vocabulary = {word: index for index, word in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" w\d+|[ <>/\n]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
