"""The planner's memory matches the memory of a rank, as closely as docs/guides/planning.md states."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from arpo_megatron.actor.logprobs import CUDA_CHUNK_ELEMENTS
from arpo_megatron.config import ParallelConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.memory import LOGITS, logits_bytes
from arpo_megatron.plan.parameters import whole_model

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def transformers_config(spec: ModelSpec) -> PreTrainedConfig:
    experts = {}
    if spec.experts is not None:
        experts = {"num_experts": spec.experts.count, "moe_intermediate_size": spec.ffn}
    return CONFIGS[spec.family](
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocabulary,
        tie_word_embeddings=spec.tied,
        **experts,
    )


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_parameter_counts_match_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(KNOWN_MODELS[name]))
    assert whole_model(KNOWN_MODELS[name]).total == sum(parameter.numel() for parameter in model.parameters())


PUBLISHED = {
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
"""Parameter counts on the models' Hugging Face pages."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_match_model_pages(name: str) -> None:
    assert whole_model(KNOWN_MODELS[name]).total == PUBLISHED[name]


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, float]]]:
    """Measurements for ranks of many layouts, one after the other in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.rank_memory", "counted", "held", "kept"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, float]]] = json.loads(done.stdout)
    return found


def test_rank_parameter_counts_match_megatron(measured: dict[str, list[dict[str, float]]]) -> None:
    assert len(measured["counted"]) == 14
    for row in measured["counted"]:
        assert row["planned"] == row["measured"], row["of"]


def test_static_memory_matches_measurement(
    measured: dict[str, list[dict[str, float]]],
) -> None:
    assert len(measured["held"]) == 21
    for row in measured["held"]:
        assert row["planned"] == pytest.approx(row["measured"], rel=0.0005), row["of"]


def test_activation_memory_matches_measurement(measured: dict[str, list[dict[str, float]]]) -> None:
    assert len(measured["kept"]) == 12
    for row in measured["kept"]:
        within = 0.05 if "recompute full" in str(row["of"]) else 0.004
        assert row["planned"] == pytest.approx(row["measured"], rel=within), row["of"]


def test_constants_match_the_trainer() -> None:
    assert LOGITS == CUDA_CHUNK_ELEMENTS


def test_logits_in_float32_and_their_gradient_in_bfloat16_are_planned() -> None:
    spec, one = KNOWN_MODELS["Qwen/Qwen3-14B"], ParallelConfig()
    usual, fp32 = (logits_bytes(spec, one, 1e9, 2, fp32=wide) for wide in (False, True))
    assert fp32 - usual == 4 * LOGITS
    assert logits_bytes(spec, one, 1e9, 4, fp32=True) == logits_bytes(spec, one, 1e9, 4)
    plans = [
        plan(resolve.resolve("deepsearch_14b", overrides=[f"model.fp32_head={on}"]), GPUS["h100-80"])
        for on in ("false", "true")
    ]
    assert plans[1].memory.training["logits"] > plans[0].memory.training["logits"]
