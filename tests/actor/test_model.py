"""Sizes and layouts that the model refuses, and its parameters."""

from dataclasses import replace

import pytest

from arpo_megatron.actor.model import build_model
from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from tests.actor import cases

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("change", "what"),
    [({"vocabulary": 33}, "vocabulary"), ({"kv_heads": 1}, "key/value heads"), ({"ffn": 31}, "MLP width")],
)
def test_model_refuses_sizes_that_cannot_be_divided(change, what):
    with pytest.raises(
        UserError, match=rf"{what} \(\d+\) cannot be divided by parallel.tensor=2: give parallel.tensor=1$"
    ):
        build_model(replace(cases.QWEN3, **change), ParallelConfig(tensor=2), "float32")


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        (
            cases.QWEN3,
            {"data": 2, "expert": 2},
            "parallel.expert=2, but the model has no experts: give parallel.expert=1",
        ),
        (replace(cases.QWEN3, heads=32, vocabulary=66), {"tensor": 4}, "by parallel.tensor=4: give parallel.tensor=2$"),
        (
            cases.QWEN3_MOE,
            {"data": 4, "expert": 4},
            r"experts \(6\) cannot be divided by parallel.expert=4: give parallel.expert=2",
        ),
        (cases.QWEN3_MOE, {"tensor": 2}, "needs parallel.sequence=true"),
        (cases.QWEN3, {"pipeline": 3}, r"layers \(2\) cannot be divided into parallel.pipeline=3 x"),
        (
            cases.QWEN3,
            {"pipeline": 2, "recompute": "full", "recompute_layers": 2},
            "recompute_layers=2 exceeds the layers of a model chunk: give parallel.recompute_layers=1 or null",
        ),
    ],
)
def test_model_refuses_layouts_that_do_not_fit(spec, layout, message):
    with pytest.raises(UserError, match=message):
        build_model(spec, ParallelConfig(**layout), "float32")


@pytest.mark.parametrize("spec", [cases.QWEN3, cases.QWEN2, cases.LLAMA], ids=lambda spec: spec.family)
def test_families_have_the_parameters_of_their_traits(spec):
    names = {name for name, _ in build_model(spec, ParallelConfig(), "float32").named_parameters()}
    assert ("output_layer.weight" in names) != spec.tied
    assert any(name.endswith("linear_qkv.bias") for name in names) == spec.qkv_bias
    assert any("q_layernorm" in name for name in names) == spec.qk_norm
