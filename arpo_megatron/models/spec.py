"""Sizes and traits of a model, read from the config.json of its Hugging Face directory."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from arpo_megatron.config import AlgorithmConfig, EngineConfig, ModelConfig, ParallelConfig, validation
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.fp8 import BLOCK

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


SPARE_POSITIONS = 8
"""Positions of a generated model beyond `model.max_length`: SGLang accepts no prompt that ends in the last seven."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies (rope_type "llama3" in transformers).

    Wavelengths above original_max_positions / low_freq_factor are scaled by `factor`, those below
    original_max_positions / high_freq_factor are unchanged, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The mixture of experts that replaces every layer's MLP; each expert has width `ModelSpec.ffn`."""

    count: int
    """Experts per layer."""
    top_k: int
    """Experts per token."""
    normalise: bool
    """The weights of a token's experts are scaled to sum to 1."""
    balance_coefficient: float
    """`router_aux_loss_coef` of config.json; used only with `model.router_aux_loss=model`."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and traits of a decoder: what is needed to build it and to name its weights."""

    family: Family
    """Selects the rows of the weight mapping."""
    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key/value heads; each serves heads / kv_heads query heads."""
    head_dim: int
    """Width of one head; heads * head_dim may differ from `hidden`."""
    ffn: int
    """Width of the gated MLP, or of each expert."""
    vocabulary: int
    """Number of rows of the embedding."""
    rope_theta: float
    """Base of the rotary frequencies."""
    norm_eps: float
    """Epsilon of RMSNorm, added to the mean square."""
    tied: bool
    """The output head shares the weights of the embedding."""
    qkv_bias: bool
    """Query, key and value projections have a bias."""
    qk_norm: bool
    """Queries and keys are normalised per head."""
    max_positions: int
    """Longest sequence that the weights were trained for."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, if any."""
    experts: MoESpec | None = None
    """The mixture of experts; None for a dense model."""

    def check_divisible(self, parallel: ParallelConfig) -> None:
        """Raise UserError if tensor, pipeline or expert parallelism cannot divide the model, or if more layers are
        recomputed than a chunk has."""
        divided = {"query heads": self.heads, "key/value heads": self.kv_heads, "vocabulary": self.vocabulary}
        if self.experts is None or parallel.expert_tensor > 1:
            divided["MLP width"] = self.ffn
        for what, size in divided.items():
            if size % parallel.tensor:
                common = math.gcd(*divided.values())
                possible = max(size for size in range(1, parallel.tensor) if common % size == 0)
                raise UserError(
                    f"the model's {what} ({size}) cannot be divided by parallel.tensor={parallel.tensor}: "
                    f"give parallel.tensor={possible}"
                )
        chunks = parallel.pipeline * parallel.virtual_pipeline
        if self.layers % chunks:
            raise UserError(
                f"the model's layers ({self.layers}) cannot be divided into parallel.pipeline={parallel.pipeline} x "
                f"parallel.virtual_pipeline={parallel.virtual_pipeline} chunks: their product must divide it"
            )
        if parallel.recompute_layers is not None and parallel.recompute_layers > self.layers // chunks:
            raise UserError(
                f"parallel.recompute_layers={parallel.recompute_layers} exceeds the layers of a model chunk: "
                f"give parallel.recompute_layers={self.layers // chunks} or null"
            )
        if self.experts is None:
            if parallel.expert > 1:
                raise UserError(
                    f"parallel.expert={parallel.expert}, but the model has no experts: give parallel.expert=1"
                )
            return
        if self.experts.count % parallel.expert:
            raise UserError(
                f"the model's experts ({self.experts.count}) cannot be divided by parallel.expert={parallel.expert}: "
                f"give parallel.expert={math.gcd(self.experts.count, parallel.expert)}"
            )
        if parallel.tensor > 1 and not parallel.sequence:
            raise UserError(
                f"a mixture of experts with parallel.tensor={parallel.tensor} needs parallel.sequence=true: otherwise "
                "every tensor-parallel rank would send every token to the experts"
            )

    def check_fp8(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        """Raise UserError if the sizes of a rank's matrix products do not fit `model.fp8`."""
        try:
            validation.check_fp8_widths(
                model.fp8,
                hidden=self.hidden,
                queries=self.heads * self.head_dim // parallel.tensor,
                keys=self.kv_heads * self.head_dim // parallel.tensor,
                ffn=self.ffn // (parallel.tensor if self.experts is None else parallel.expert_tensor),
            )
            validation.check_fp8_layers(model, self.layers, parallel)
        except ValueError as error:
            raise UserError(str(error)) from None

    def check_attention(self, model: ModelConfig) -> None:
        """Raise UserError if `model.attention_backend` has no kernels for the heads."""
        try:
            validation.check_heads(model, self.head_dim)
        except ValueError as error:
            raise UserError(str(error)) from None

    def check_engine(self, engine: EngineConfig, parallel: ParallelConfig) -> None:
        """Raise UserError if engines cannot hold the model, or the trainer cannot quantize its part of it.

        A rank, on either side, must hold whole blocks of FP8 weights. SGLang refuses other sizes when it starts. Ranks
        beyond the number of key/value heads would hold copies of heads.
        """
        if engine.expert > 1 and (self.experts is None or self.experts.count % engine.expert):
            count = 0 if self.experts is None else self.experts.count
            raise UserError(
                f"engine.expert={engine.expert} cannot divide the model's experts: it has {count or 'none'}; "
                f"give engine.expert={math.gcd(count, engine.expert) if count else 1}"
            )
        if engine.quantization == "none":
            return
        if engine.tensor > self.kv_heads:
            raise UserError(
                f"engine.quantization={engine.quantization} needs engine.tensor <= {self.kv_heads}, the model's "
                f"key/value heads, not {engine.tensor}"
            )
        dense = self.experts is None
        for side, tensor, expert_tensor in (
            ("engine", engine.tensor, engine.tensor // engine.expert),
            ("trainer", parallel.tensor, parallel.expert_tensor),
        ):
            widths = {
                "hidden size": self.hidden,
                "query width": self.heads * self.head_dim // tensor,
                "head size": self.head_dim,
                "MLP width": self.ffn // (tensor if dense else expert_tensor),
            }
            try:
                validation.check_multiples("engine.quantization=fp8: the", f"of {side} ranks", widths, BLOCK)
            except ValueError as error:
                more = f"engine.expert={engine.tensor} divides no expert"
                if side == "trainer":
                    more = f"a larger parallel.expert (now {parallel.expert}) divides an expert among fewer ranks"
                raise UserError(f"{error}; {more}" if not dense and "MLP" in str(error) else str(error)) from None

    def check_replay(self, algorithm: AlgorithmConfig) -> None:
        """Raise UserError if the job replays expert routes and the model has no experts."""
        if algorithm.router_replay != "none" and self.experts is None:
            raise UserError(
                f"algorithm.router_replay={algorithm.router_replay}, but the model has no experts: "
                "give algorithm.router_replay=none"
            )

    @classmethod
    def from_hf(cls, path: Path) -> Self:
        """Read `path`/config.json.

        Raises:
            UserError: the directory or the file does not exist, the architecture is unknown, or it is a variant that
                the trainer does not implement (sliding windows, other biases, other rotary scalings).
        """
        family = _family(path)
        config = _parse(path)
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
        for name in sizes:
            if getattr(config, name) < 1:
                raise UserError(f"{path / 'config.json'}: {name}={getattr(config, name)} must be at least 1")
        _check_variant(path, family, config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            ffn=config.moe_intermediate_size if family == "qwen3_moe" else config.intermediate_size,
            vocabulary=config.vocab_size,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            norm_eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            max_positions=config.max_position_embeddings,
            rope_scaling=_rope_scaling(path, config.rope_parameters),
            experts=_experts(path, config) if family == "qwen3_moe" else None,
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
    if not isinstance(data, dict):
        raise UserError(f"{file} holds no JSON object")
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in _FAMILIES:
        raise UserError(f"{file}: architecture {architecture!r} is not supported (supported: {', '.join(_FAMILIES)})")
    return _FAMILIES[architecture]


def _parse(path: Path) -> Any:
    """Parse the config with transformers, which knows every family's defaults and both spellings of the rotary
    fields."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path / 'config.json'}: transformers cannot read it: {reason}") from error


def _check_variant(path: Path, family: Family, config: Any) -> None:
    """Refuse options that would change the computation and are not implemented."""
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


def _experts(path: Path, config: Any) -> MoESpec:
    file = path / "config.json"
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise UserError(
            f"{file}: mlp_only_layers={config.mlp_only_layers} and decoder_sparse_step={config.decoder_sparse_step} "
            "mix dense and expert layers; only models with experts in every layer are supported"
        )
    if not 0 < config.num_experts_per_tok <= config.num_experts:
        raise UserError(
            f"{file}: num_experts_per_tok={config.num_experts_per_tok} of {config.num_experts} experts cannot be chosen"
        )
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise UserError(f"{file}: norm_topk_prob with one expert a token gives the router no gradient: not supported")
    return MoESpec(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        balance_coefficient=float(config.router_aux_loss_coef),
    )
