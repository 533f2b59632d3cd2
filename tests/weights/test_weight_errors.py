"""Errors that the user can fix name the file, the tensor and the field in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from arpo_megatron.config import EngineConfig, ModelConfig, ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import check_inputs
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec, MoESpec, RopeScaling
from tests.models.tiny_models import LLAMA3_ROPE, make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make(path, "qwen3")
    return path


def line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def write_config(directory: Path, source: Path, **changes: Any) -> Path:
    config = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "'Qwen3ForSequenceClassification' is not supported"),
        ({"architectures": None}, "'none' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'linear' is not"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
    ],
)
def test_unsupported_model_variants_are_refused(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        ModelSpec.from_hf(write_config(tmp_path, source, **changes))
    assert message in line(error)
    assert str(tmp_path / "config.json") in line(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] and decoder_sparse_step=1 mix dense and expert layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 mix dense and expert layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8 experts cannot be chosen"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob with one expert a token gives the router no gradient"),
    ],
)
def test_unsupported_mixtures_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make(tmp_path, "qwen3moe")
    assert ModelSpec.from_hf(tmp_path).experts == MoESpec(8, 3, True, 0.001)
    with pytest.raises(UserError, match=message) as error:
        ModelSpec.from_hf(write_config(tmp_path, tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("hub_id", "engine", "trainer", "message"),
    [
        ("Qwen/Qwen3-14B", {"tensor": 4}, {"tensor": 8}, ""),
        ("Qwen/Qwen3-30B-A3B", {"tensor": 4, "expert": 4}, {"data": 8, "expert": 8}, ""),
        (
            "Qwen/Qwen2.5-3B-Instruct",
            {"tensor": 4},
            {},
            r"needs engine\.tensor <= 2, the model's key/value heads, not 4",
        ),
        (
            *("Qwen/Qwen3-30B-A3B", {"tensor": 4}, {"data": 8, "expert": 8}),
            r"MLP width of engine ranks \(192\) is not a multiple of 128; engine\.expert=4 divides no expert",
        ),
        ("Qwen/Qwen2.5-7B-Instruct", {}, {"tensor": 8}, r"query width of trainer ranks \(448\)"),
        (
            "Qwen/Qwen3-8B",
            {"tensor": 2, "expert": 2},
            {},
            r"engine\.expert=2 cannot divide the model's experts: it has none; give engine\.expert=1$",
        ),
    ],
)
def test_quantized_engine_needs_whole_blocks_on_both_sides(
    hub_id: str, engine: dict[str, int], trainer: dict[str, int], message: str
) -> None:
    spec, sizes, parallel = KNOWN_MODELS[hub_id], EngineConfig(quantization="fp8", **engine), ParallelConfig(**trainer)
    if not message:
        spec.check_engine(sizes, parallel)
        return
    with pytest.raises(UserError, match=message):
        spec.check_engine(sizes, parallel)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["model.heads=1", "model.kv_heads=1"], ""),
        ([], r"^engine\.quantization=fp8: the head size of engine ranks .32. is not a multiple of 128"),
        (["model.heads=4", "model.kv_heads=2", "engine.tensor=4"], r"needs engine\.tensor <= 2, the model's key/value"),
    ],
)
def test_quantized_engine_needs_whole_blocks_of_a_generated_model(sizes: list[str], message: str) -> None:
    job = resolve.resolve("quickstart", overrides=["engine.quantization=fp8", "model.dtype=bfloat16", *sizes])
    if not message:
        check_inputs(job)
        return
    with pytest.raises(UserError, match=message):
        check_inputs(job)


def test_flash_attention_refuses_wide_heads() -> None:
    spec, model = KNOWN_MODELS["Qwen/Qwen3-8B"], ModelConfig(attention_backend="flash")
    spec.check_attention(model)
    wide = replace(spec, head_dim=256)
    wide.check_attention(ModelConfig())
    with pytest.raises(UserError, match=r"^model\.attention_backend=flash needs heads .* at most 128, not 256: give"):
        wide.check_attention(model)


def test_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory") as error:
        ModelSpec.from_hf(tmp_path / "nowhere")
    assert "nowhere" in line(error)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no JSON object"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        ModelSpec.from_hf(tmp_path)


def test_both_spellings_of_the_rotary_fields_are_read(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 1234.0}))
    assert ModelSpec.from_hf(tmp_path).rope_theta == 1234.0
    make(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    assert ModelSpec.from_hf(tmp_path).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    assert ModelSpec.from_hf(tmp_path).rope_theta == 5000.0


@pytest.fixture(scope="module")
def model_and_spec(one_rank: None, source: Path) -> tuple[Any, ModelSpec]:
    from arpo_megatron.actor.model import build_model

    spec = ModelSpec.from_hf(source)
    return build_model(spec, ParallelConfig(), "float32"), spec


def refusal(model_and_spec: tuple[Any, ModelSpec], path: Path) -> str:
    from arpo_megatron.weights.load import load_hf

    with pytest.raises(UserError) as error:
        load_hf([model_and_spec[0]], model_and_spec[1], path)
    return line(error)


def test_missing_misshapen_and_unknown_tensors_are_named(
    model_and_spec: tuple[Any, ModelSpec], source: Path, tmp_path: Path
) -> None:
    name, file = "model.layers.1.mlp.up_proj.weight", tmp_path / "model.safetensors"
    tensors = load_file(source / "model.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    assert f"tensor {name} is missing" in refusal(model_and_spec, tmp_path)
    save_file(tensors | {name: torch.zeros(3, 5)}, file)
    assert f"tensor {name} has shape [3, 5], but config.json gives [48, 32]" in refusal(model_and_spec, tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file)
    assert "tensor model.layers.0.self_attn.q_proj.bias (one of 1) does not belong" in refusal(model_and_spec, tmp_path)


def test_job_check_finds_a_missing_tensor(source: Path, tmp_path: Path) -> None:
    write_config(tmp_path, source)
    tensors = load_file(source / "model.safetensors")
    job = resolve.resolve("quickstart", overrides=[f"model.path={tmp_path}", f"run_dir={tmp_path}/run"])
    save_file(tensors, tmp_path / "model.safetensors")
    check_inputs(job)
    save_file({key: tensor for key, tensor in tensors.items() if "norm" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is missing"):
        check_inputs(job)


def test_missing_and_damaged_files_are_named(model_and_spec: tuple[Any, ModelSpec], tmp_path: Path) -> None:
    assert "has neither model.safetensors nor" in refusal(model_and_spec, tmp_path)
    assert "is not a directory" in refusal(model_and_spec, tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    assert "model.safetensors is damaged" in refusal(model_and_spec, tmp_path)
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    assert "model.safetensors is damaged: it ends before its tensor a" in refusal(model_and_spec, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.replace(b"16", b"12"))
    assert "tensor a of shape [4] cannot take 12 bytes" in refusal(model_and_spec, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is damaged" in refusal(model_and_spec, tmp_path)
    names = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "is missing" in refusal(model_and_spec, tmp_path)
