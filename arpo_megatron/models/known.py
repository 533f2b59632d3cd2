"""Sizes of the models that recipes train, so that a job can be planned before its weights are downloaded.

They come from the config.json of each Hugging Face repository; tests build each model on the meta device and compare.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo_megatron.config import ModelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.models.spec import SPARE_POSITIONS, ModelSpec, MoESpec, RopeScaling

_QWEN2: Mapping[str, Any] = {
    "family": "qwen2",
    "head_dim": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qkv_bias": True,
    "qk_norm": False,
    "max_positions": 32768,
}
_QWEN3: Mapping[str, Any] = {
    "family": "qwen3",
    "kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 151936,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "tied": False,
    "qkv_bias": False,
    "qk_norm": True,
    "max_positions": 40960,
}

KNOWN_MODELS: Mapping[str, ModelSpec] = {
    "Qwen/Qwen2.5-3B-Instruct": ModelSpec(
        **_QWEN2, layers=36, hidden=2048, heads=16, kv_heads=2, ffn=11008, vocabulary=151936, tied=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelSpec(
        **_QWEN2, layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocabulary=152064, tied=False
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ModelSpec(
        family="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocabulary=128256,
        rope_theta=500000.0,
        norm_eps=1e-5,
        tied=False,
        qkv_bias=False,
        qk_norm=False,
        max_positions=131072,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
    "Qwen/Qwen3-0.6B": ModelSpec(**{**_QWEN3, "tied": True}, layers=28, hidden=1024, heads=16, ffn=3072),
    "Qwen/Qwen3-1.7B": ModelSpec(**{**_QWEN3, "tied": True}, layers=28, hidden=2048, heads=16, ffn=6144),
    "Qwen/Qwen3-4B": ModelSpec(**{**_QWEN3, "tied": True}, layers=36, hidden=2560, heads=32, ffn=9728),
    "Qwen/Qwen3-8B": ModelSpec(**_QWEN3, layers=36, hidden=4096, heads=32, ffn=12288),
    "Qwen/Qwen3-14B": ModelSpec(**_QWEN3, layers=40, hidden=5120, heads=40, ffn=17408),
    "Qwen/Qwen3-32B": ModelSpec(**_QWEN3, layers=64, hidden=5120, heads=64, ffn=25600),
    "Qwen/Qwen3-30B-A3B": ModelSpec(
        **{**_QWEN3, "family": "qwen3_moe", "kv_heads": 4},
        layers=48,
        hidden=2048,
        heads=32,
        ffn=768,
        experts=MoESpec(count=128, top_k=8, normalise=True, balance_coefficient=0.001),
    ),
}
"""Specs by Hugging Face id."""


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "tied", "qkv_bias", "qk_norm")


def load_spec(model: ModelConfig) -> ModelSpec:
    """Return the spec of a job's model: from its files if they exist, else from `KNOWN_MODELS`.

    Raises:
        UserError: the files cannot be read, or there are none and the model is not in `KNOWN_MODELS`.
    """
    if model.path is not None and (model.path / "config.json").is_file():
        spec = ModelSpec.from_hf(model.path)
        check_is_known(spec, model.hub_id, model.path)
        return spec
    if model.is_generated:
        return _made(model)
    if (known := KNOWN_MODELS.get(model.hub_id or "")) is not None:
        return known
    if model.path is not None:
        raise UserError(f"model.path={model.path}: no Hugging Face model there (config.json is missing)")
    raise UserError(f"model.hub_id={model.hub_id}: its sizes are not known without its files; give model.path=DIR")


def check_is_known(spec: ModelSpec, hub_id: str | None, path: Path) -> None:
    """Raise UserError if the files at `path` have other sizes than the model `hub_id`."""
    known = KNOWN_MODELS.get(hub_id or "")
    if known is None:
        return
    for name in _SIZES:
        if getattr(spec, name) != getattr(known, name):
            raise UserError(
                f"model.path={path} has {name} {getattr(spec, name)}, but {hub_id} has {getattr(known, name)}: the "
                "layout was chosen for that one; for another model give model.hub_id=null too"
            )


def _made(model: ModelConfig) -> ModelSpec:
    """Return the spec of the model that `jobs/inputs.py` makes; its vocabulary may turn out smaller."""
    return ModelSpec(
        family="qwen3",
        layers=model.layers,
        hidden=model.hidden_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        ffn=model.ffn_size,
        vocabulary=model.vocabulary_size,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        max_positions=model.max_length + SPARE_POSITIONS,
    )
