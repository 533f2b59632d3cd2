"""Random tiny models of every family, made by transformers, and their log-probs through Megatron."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-rope3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3-tied": {"tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 4},
    "qwen3moe": {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "qwen3moe-tied-raw": {  # weights of the chosen experts as the softmax gives them
        "tie_word_embeddings": True,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
}


def make(directory: Path, case: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a transformers model of the case in `directory` and return it; no parameter has a neutral value."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe"}[case.partition("-")[0]]
    config_class, model_class = (getattr(transformers, name + part) for part in ("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SIZES, **CASES[case], **changes})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a transformers model under the names of its files; in memory all experts are two
    tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        experts, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = parameter.grad
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, gradient in enumerate(parameter.grad):
            pieces = zip(parts, gradient.chunk(len(parts)), strict=True)
            found.update({f"{experts}.{number}.{part}.weight": piece for part, piece in pieces})
    return found


def sample_tokens(length: int = 40, seed: int = 3) -> Tensor:
    """Return random token ids, int64[length]."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def reference_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probs [n - 1] of each token after the first, by transformers."""
    table = model(tokens[None]).logits[0].log_softmax(-1)
    return table[:-1].gather(1, tokens[1:, None])[:, 0]


def megatron_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probs [n - 1] by the trainer's model, from a pack of one plain sequence."""
    from arpo_megatron.actor.microbatch import MicroBatches
    from arpo_megatron.algorithms.credit import supervised_credit
    from arpo_megatron.packing.packs import pack_trees
    from arpo_megatron.tree import Role, RolloutTree

    tree = RolloutTree("plain", tokens[:1].numpy())
    tree.add(0, Role.MODEL, tokens[1:].numpy())
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=len(tokens))
    with MicroBatches(packs, None) as batches:
        return model(*batches.make(0).inputs)[0]


def weigh(logprobs: Tensor) -> Tensor:
    """Return a scalar with a gradient of either sign through every token."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(5))
    return (logprobs * weights).sum() / len(logprobs)
