"""What a model is made of, read from the config.json of its Hugging Face directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError

Family = Literal["llama", "qwen2", "qwen3"]

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (rope_type "llama3" in transformers).

    Wavelengths above original_max_positions / low_freq_factor are divided by `factor`, those below
    original_max_positions / high_freq_factor stay, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and traits of a dense decoder: everything that building it and naming its weights needs.

    Attributes:
        family: which rows of the weight mapping apply.
        layers: transformer layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; each serves heads / kv_heads query heads.
        head_dim: width of one head (heads * head_dim need not be `hidden`).
        ffn: width of the gated MLP.
        vocabulary: rows of the embedding.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tied: the output head is the embedding.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: queries and keys are normalised per head.
        max_positions: longest sequence the weights were made for.
        rope_scaling: stretch of the rotary frequencies, if there is one.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None

    def check_divisible(self, parallel: ParallelConfig) -> None:
        """Raises UserError where tensor parallelism cannot divide the model."""
        for what, size in (
            ("query heads", self.heads),
            ("key/value heads", self.kv_heads),
            ("MLP width", self.ffn),
            ("vocabulary", self.vocabulary),
        ):
            if size % parallel.tensor:
                raise UserError(f"the model's {what} ({size}) cannot be divided by parallel.tensor={parallel.tensor}")

    @classmethod
    def from_hf(cls, path: Path) -> Self:
        """Read `path`/config.json.

        Raises:
            UserError: no such directory or file, an unknown architecture, or a variant of a known one that the
                trainer does not compute (sliding windows, other biases, other rotary scalings).
        """
        family = _family(path)
        config = _parse(path)
        _check_variant(path, family, config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            ffn=config.intermediate_size,
            vocabulary=config.vocab_size,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            norm_eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_positions=config.max_position_embeddings,
            rope_scaling=_rope_scaling(path, config.rope_parameters),
        )


def _family(path: Path) -> Family:
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: model.path must be a Hugging Face model directory")
    file = path / "config.json"
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file} is missing: model.path must be a Hugging Face model directory") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in _FAMILIES:
        raise UserError(f"{file}: architecture {architecture!r} is not supported (supported: {', '.join(_FAMILIES)})")
    return _FAMILIES[architecture]


def _parse(path: Path) -> Any:
    """The config through transformers, which knows every family's defaults and both spellings of the rotary fields."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path / 'config.json'}: transformers cannot read it: {reason}") from error


def _check_variant(path: Path, family: Family, config: Any) -> None:
    """Refuse options that would change the computation and that nothing here implements."""
    unsupported = {
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": family != "qwen2" and config.attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "quantization_config": getattr(config, "quantization_config", None) is not None,
    }
    for name, present in unsupported.items():
        if present:
            raise UserError(f"{path / 'config.json'}: {name}={getattr(config, name)!r} is not supported")


def _rope_scaling(path: Path, rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{path / 'config.json'}: rope_type {kind!r} is not supported (supported: default, llama3)")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
