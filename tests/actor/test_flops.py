"""The count of work agrees with what torch counts, and trees claim only what they compute."""

import cases
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from arpo_megatron.actor.flops import forward_flops, work_of
from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.algorithms.credit import supervised_credit


def test_a_forward_pass_has_the_flops_that_torch_counts():
    shape, tokens = cases.QWEN3, 24
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    layers, head = forward_flops(shape, tokens, tokens * tokens, tokens)  # eager attention computes every pair
    rotary = 2 * (shape.head_dim // 2) * tokens  # transformers makes the angles by a matrix product
    assert counter.get_total_flops() == pytest.approx(layers + head + rotary, rel=1e-12)


def test_a_cut_that_repeats_ancestors_claims_no_more_model_flops():
    tree = cases.grown(1, samples=8, length=20)
    credit = supervised_credit([tree])
    whole, inheriting, repeating = (
        work_of(cases.QWEN3, pack_trees([tree], credit, token_budget=budget, inherit=inherit))
        for budget, inherit in ((10**6, True), (60, True), (80, False))
    )
    assert repeating.repeated > 0 == inheriting.repeated == whole.repeated
    for work in (inheriting, repeating):
        assert work.model_update == pytest.approx(whole.model_update, rel=1e-12)
    assert repeating.hardware_update(recompute=True) > whole.hardware_update(recompute=True) > whole.model_update
