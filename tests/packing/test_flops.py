"""FLOP counts agree with torch's, and trees count only what they compute."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import ParallelConfig
from arpo_megatron.packing.flops import UpdateFlops, forward_flops, update_flops
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases


def qwen3(spec, **more):
    """Return a transformers model of the spec whose attention computes every pair."""
    moe = spec.experts is not None
    config = (Qwen3MoeConfig if moe else Qwen3Config)(
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocabulary,
        attn_implementation="eager",
        **more,
    )
    return (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config)


def counted(model, tokens, *, backward=False):
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(tokens)[None], use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


TOKENS = 24
ROTARY = 2 * (cases.QWEN3.head_dim // 2) * TOKENS
"""transformers makes the angles by a matrix product, without a backward pass."""


def test_forward_flops_equal_torchs_count():
    layers, head = forward_flops(cases.QWEN3, TOKENS, TOKENS * TOKENS, TOKENS)
    assert counted(qwen3(cases.QWEN3), TOKENS) == pytest.approx(layers + head + ROTARY, rel=1e-12)


def test_backward_pass_has_twice_the_flops():
    work = UpdateFlops(
        *forward_flops(cases.QWEN3, TOKENS, TOKENS * TOKENS, TOKENS), repeated=0.0, attention=0.0, mlp=0.0
    )
    assert counted(qwen3(cases.QWEN3), TOKENS, backward=True) == pytest.approx(work.model_update + ROTARY, rel=1e-12)


def test_mixture_counts_only_visited_experts():
    spec = cases.QWEN3_MOE
    model = qwen3(
        spec,
        moe_intermediate_size=spec.ffn,
        num_experts=spec.experts.count,
        num_experts_per_tok=spec.experts.top_k,
        experts_implementation="eager",
    )
    layers, head = forward_flops(spec, TOKENS, TOKENS * TOKENS, TOKENS)
    assert counted(model, TOKENS) == pytest.approx(layers + head + ROTARY, rel=1e-12)


def test_recomputation_adds_hardware_flops_only():
    work = UpdateFlops(layers=100.0, head=10.0, repeated=20.0, attention=30.0, mlp=40.0)
    assert work.model_update == 3 * (100 - 20 + 10)
    layouts: dict[float, dict[str, object]] = {
        340: {},
        370: {"recompute": "selective", "recompute_modules": ("core_attn",)},
        380: {"recompute": "selective"},
        440: {"recompute": "full"},
        365: {"recompute": "full", "recompute_layers": 1},
    }
    assert {again: work.hardware_update(ParallelConfig(**fields), 4) for again, fields in layouts.items()} == {
        again: again for again in layouts
    }


def test_repeated_ancestors_add_no_model_flops():
    tree = cases.grown(1, samples=8, length=20)
    credit = supervised_credit([tree])
    whole, inheriting, repeating = (
        update_flops(cases.QWEN3, pack_trees([tree], credit, token_budget=budget, inherit=inherit))
        for budget, inherit in ((10**6, True), (60, True), (80, False))
    )
    assert repeating.repeated > 0 == inheriting.repeated == whole.repeated
    for work in (inheriting, repeating):
        assert work.model_update == pytest.approx(whole.model_update, rel=1e-12)
    again = ParallelConfig(recompute="full")
    assert repeating.hardware_update(again, 2) > whole.hardware_update(again, 2) > whole.model_update
