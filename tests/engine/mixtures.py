"""A random mixture of experts for tests of expert routes."""

import shutil
from pathlib import Path

from arpo_megatron.engine.expert_routes import ExpertRouteSpec

SHAPE = ExpertRouteSpec(layers=3, top_k=2)


def write_mixture(folder: Path, tokenizer: Path, dtype: str = "float32", **sizes: int) -> Path:
    """Write a random Qwen3-MoE with the tokenizer of another model; return its directory."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 28,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": SHAPE.top_k,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 0,
    }
    config = Qwen3MoeConfig(**defaults | sizes, norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.1)
    Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
