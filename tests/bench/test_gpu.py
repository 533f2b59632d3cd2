"""GPU measurements, run on a CPU with tiny models; those that start engines or a job are campaigns."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from arpo_megatron.bench.gpu.exact import ExactBench, exact_measurements
from arpo_megatron.bench.gpu.measure import run_all
from arpo_megatron.bench.gpu.push import PushBench, push_measurements
from arpo_megatron.bench.gpu.random_engines import EngineKind, RandomEngines, step_bytes, write_directory
from arpo_megatron.bench.gpu.rollout import Load, RolloutBench, rollout_measurements
from arpo_megatron.bench.gpu.step import StepBench
from arpo_megatron.bench.gpu.update import MEASURED, QWEN3_4B, UpdateBench, trees_of, update_measurements
from arpo_megatron.bench.tool_calling_model import sums
from arpo_megatron.cli.bench_gpu import app
from arpo_megatron.config import AlgorithmConfig, EngineConfig, ModelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.specs import GPUS
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.recompute import describe
from arpo_megatron.plan.synthetic_trees import MIXES, Mix
from arpo_megatron.rollout.worker import TokenizerCodec

TINY = replace(QWEN3_4B, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, vocabulary=1024)
SIZES = EngineConfig(max_running_requests=16, max_total_tokens=16384, memory_fraction=0.1)


def test_failed_measurement_is_a_result_and_costs_no_other() -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("out of memory\nand a trace")

    results = run_all({"a": fail, "b": lambda: {"figure": 1}})
    assert results["a"]["error"] == "RuntimeError: out of memory"
    assert results["b"]["figure"] == 1


def test_commands_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "gpu.md").read_text()
    help_text = CliRunner().invoke(app, ["--help"]).stdout
    for command in ("exact", "kernels", "update", "rollout", "push", "step"):
        assert f"arpo bench gpu {command}" in page
        assert command in help_text


@pytest.mark.parametrize("command", ["exact", "kernels", "update", "rollout", "push", "step"])
def test_machine_without_gpu_is_refused_before_anything_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.hardware.placement._visible_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="needs a GPU, and torch finds none"):
        CliRunner().invoke(app, [command], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_every_update_fits_an_h200_with_the_planners_reserve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without recomputation a cut tree of the reasoning family would need 162 GiB, because its packs live together."""
    monkeypatch.setattr("arpo_megatron.bench.gpu.update.check_machine", lambda config: None)
    h200 = GPUS["h200"].memory
    chosen = update_measurements(UpdateBench(memory=h200))
    assert list(chosen) == list(MEASURED) and not capsys.readouterr().err
    recompute = {name: describe(measure.args[1]) for name, measure in chosen.items() if isinstance(measure, partial)}
    assert recompute["bfloat16 flat 8192"] == "none"
    assert "none" not in {recompute[name] for name in ("bfloat16 reasoning", "blockwise flat 16384")}
    with pytest.raises(UserError, match=r"flat 8192: not measured: needs .* GiB with full recomputation, the GPU has"):
        update_measurements(UpdateBench(memory=40 * 2**30))


def test_update_that_this_machine_cannot_run_is_named_before_the_others_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.hardware.transformer_engine.version", lambda package: "2.20.2")
    chosen = update_measurements(UpdateBench())
    assert {name.split()[0] for name in chosen} == {"bfloat16"}
    assert "blockwise flat 8192: not measured: FP8 on a CPU needs the Python of" in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_exactness_and_update_speed_are_measured_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Mix(samples=4, initial=2, calls=1, prompt=40, segment=(5, 30), result=(5, 30))
    monkeypatch.setitem(MIXES, "small", small)
    tiny = ModelConfig(hidden_size=64, layers=1, heads=4, kv_heads=2, ffn_size=64, max_length=4096)
    found = exact_measurements(ExactBench(tmp_path, model=tiny, mix="small"))["model none"]()
    assert found["ratio_before_update"] == 1.0
    assert 0 < found["gap_to_float32"]["max"] < 0.2
    bench = UpdateBench(spec=TINY, dtype="float32", repeats=1)
    sides = trees_of("small", TINY.vocabulary, 8192)
    found = bench.measure("none", bench.layout("none", sides, 8192), sides, 8192)
    assert found["tree"]["tokens"] < found["flat"]["tokens"]
    assert found["tree"]["tokens_per_s"] > 0


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B-Instruct"])
def test_written_directory_has_the_spec_and_a_word_for_every_token(name: str, tmp_path: Path) -> None:
    spec = KNOWN_MODELS[name]
    write_directory(tmp_path, spec, "bfloat16", sums(4))
    assert ModelSpec.from_hf(tmp_path) == spec
    assert TokenizerCodec(tmp_path).vocabulary_size == spec.vocabulary


def test_decoding_step_reads_all_weights_once_and_keys_and_values_per_request() -> None:
    spec = KNOWN_MODELS["Qwen/Qwen3-8B"]
    embedding = 151936 * 4096
    weights = step_bytes(spec, requests=1, context=0, value=2, product=2)
    assert weights == 2 * (8_190_735_360 - embedding)  # the model card: 8.19 billion parameters
    one = step_bytes(spec, requests=1, context=1, value=2, product=2) - weights
    assert one == 147456
    assert step_bytes(spec, requests=3, context=5, value=2, product=2) == weights + 15 * one
    assert step_bytes(spec, requests=1, context=0, value=2, product=1) == weights - 36 * (
        4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    )


@pytest.mark.slow_campaign
def test_decoding_and_trees_are_measured_on_a_real_engine(tmp_path: Path) -> None:
    with RandomEngines(tmp_path, "float32", SIZES) as engines:
        algorithm = AlgorithmConfig(group_size=4, initial_rollouts=2, entropy_tokens=4)
        bench = RolloutBench(engines, {"tiny": TINY}, [Load(2, 8)], (2, 6), 1, algorithm, tasks=2, tool_s=0.01)
        measurements = rollout_measurements(bench)
        found = measurements["decode tiny"]()
        figures = found["2 requests, prompts of 8"]
        assert figures["tokens_per_s"] > 0
        assert figures["floor_ms"] < figures["step_ms"]
        assert len(found["startup_s"]) == len(figures["entropy_costs"]) + 1 == 2
        with_it, without = engines.only(EngineKind(TINY), EngineKind(TINY, entropy=False))
        assert "entropy" in _sample(with_it.url)
        assert "entropy" not in _sample(without.url)
        found = measurements["trees tiny"]()
        assert not without.alive()
        assert (found["trees"], found["failed"], found["trajectories"]) == (2, 0, 8)
        assert found["prefill_over_unique"] <= 1.05


def _sample(url: str) -> dict[str, object]:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    meta: dict[str, object] = requests.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    return meta


@pytest.mark.slow_campaign
@pytest.mark.usefixtures("one_rank")
def test_pushes_and_lent_memory_are_measured_on_a_real_engine(tmp_path: Path) -> None:
    with RandomEngines(tmp_path, "float32", SIZES) as engines:
        bench = PushBench(engines, TINY, buckets_mib=(1, 64), repeats=1)
        measurements = push_measurements(bench)
        push, memory = measurements["push float32"](), measurements["memory float32"]()
        bench.close()
    assert push["tensors_verified"] > 0
    assert max(push["first_probe_gap"], push["probe_gap"], memory["probe_gap_after"]) < 1e-4
    assert push["buckets of 64 MiB"]["push_s"][0] > 0
    assert set(push["buckets of 1 MiB"]["of_it_s"]) == {"begin", "load", "commit"}
    assert len(memory["release_s"]) == len(memory["resume_s"]) == 1


@pytest.mark.slow_campaign
@pytest.mark.timeout(1200)
def test_phases_of_a_whole_job_are_measured(tmp_path: Path) -> None:
    spec = replace(QWEN3_4B, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocabulary=960)
    found = StepBench(tmp_path, spec=spec, dtype="float32", steps=2, response=256, tasks=4, group_size=4).measure()
    for phase in ("rollout", "logprobs", "update", "push"):
        assert found["seconds_by_phase"][phase] > 0, phase
    assert found["forks"] > 0
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
