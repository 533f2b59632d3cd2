"""`model.attention_backend` reaches FlexAttention in every layer, and nothing else changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arpo_megatron.actor import flex_attention, microbatch
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.flex_attention import FlexPlan, flex_plan
from arpo_megatron.packing.layout import Span
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases

pytestmark = pytest.mark.usefixtures("one_rank")


def plan_flex(subtree_end: Any, spans: list[Span]) -> FlexPlan:
    """Plan what a GPU would compute; FlexAttention has a forward pass on a CPU, too."""
    return flex_plan(subtree_end, np.concatenate([np.arange(*span) for span in spans]))


@pytest.mark.parametrize(("backend", "options"), [("auto", None), ("flash", {"BACKEND": "FLASH"})])
def test_every_layer_passes_the_backend_to_flex_attention(monkeypatch: pytest.MonkeyPatch, backend, options) -> None:
    kernel, given = flex_attention._kernel(False), []

    def noted(*tensors: Tensor, **arguments: Any) -> Tensor:
        given.append(arguments["kernel_options"])
        return kernel(*tensors, **arguments)

    monkeypatch.setattr(flex_attention, "_kernel", lambda compiled: noted)
    job = cases.job(dtype="bfloat16")
    torch.manual_seed(1)
    job = replace(job, model=replace(job.model, attention_backend=backend))
    actor = Actor(job, cases.QWEN3, None, optimizer=None, total_updates=1)
    packs = pack_trees(*cases.batch(0), token_budget=120)
    expected = actor.logprobs(packs)
    assert not given, "on a CPU attention needs no FlexAttention"
    monkeypatch.setattr(microbatch, "plan_attention", plan_flex)
    found = actor.logprobs(packs)
    assert given == [options] * (len(packs) * cases.QWEN3.layers)
    for pack, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(pack, other, atol=0.1)
