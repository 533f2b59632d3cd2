"""What is measured on a GPU machine is tried here: everything up to the first use of a GPU, and the whole on a CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from arpo_megatron.bench.gpu.exact import Exactness, exact_parts
from arpo_megatron.bench.gpu.journal import Part, run_parts
from arpo_megatron.bench.gpu.push import Pushes, push_parts
from arpo_megatron.bench.gpu.random_engines import Kind, RandomEngines, step_bytes, write_directory
from arpo_megatron.bench.gpu.rollout import Load, Rollouts, rollout_parts
from arpo_megatron.bench.gpu.update import QWEN3_4B, Bench, update_parts
from arpo_megatron.bench.tool_calling_model import sums
from arpo_megatron.config import AlgorithmConfig, EngineConfig, ModelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.rollout.worker import TokenizerCodec

TINY = replace(QWEN3_4B, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, vocabulary=1024)
SIZES = EngineConfig(max_running_requests=16, max_total_tokens=16384, memory_fraction=0.1)


DRY_RUNS = """
import sys
from typer.testing import CliRunner
from arpo_megatron.cli.bench_gpu import app

for command in sys.argv[2:]:
    done = CliRunner().invoke(app, [command, "--dry", "--out", sys.argv[1]], catch_exceptions=False)
    print(done.stdout.splitlines()[-1])
"""
COMMANDS = ["demo", "exact", "update", "rollout", "push", "step", "largest", "profile"]


def test_a_dry_run_builds_every_part_and_records_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DRY_RUNS, tmp_path, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(COMMANDS)
    for answer in answers:
        assert answer["dry"]
        assert not answer.get("failed"), answer
        assert not answer.get("left"), answer
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_part_is_run_once_and_one_that_failed_again(tmp_path: Path) -> None:
    runs: list[str] = []

    def part(name: str, fails: bool = False) -> Part:
        def measure() -> dict[str, int]:
            runs.append(name)
            if fails:
                raise RuntimeError("out of memory\nand a trace")
            return {"figure": 1}

        return Part(name, lambda: measure)

    parts = [part("a"), part("b", fails=True), part("c")]
    first = run_parts("item", parts, tmp_path, minutes=1)
    assert first["failed"] == ["b"]
    assert first["parts"]["b"]["error"] == "RuntimeError: out of memory"
    with (tmp_path / "item.jsonl").open("a") as journal:
        journal.write('{"part": "cut sh')  # killed while it wrote
    second = run_parts("item", parts, tmp_path, minutes=1)
    assert runs == ["a", "b", "c", "b"]
    assert second["parts"]["a"] == first["parts"]["a"]
    assert run_parts("item", [part("d")], tmp_path, minutes=0)["left"] == ["d"]
    run_parts("item", parts, tmp_path, minutes=1, fresh=True)
    assert runs == ["a", "b", "c", "b", "a", "b", "c"]


@pytest.mark.usefixtures("one_rank")
def test_the_measuring_code_runs_on_a_cpu_with_a_tiny_model(tmp_path: Path) -> None:
    tiny = ModelConfig(hidden_size=64, layers=1, heads=4, kv_heads=2, ffn_size=64, max_length=4096)
    parts = [p for p in exact_parts(Exactness(tmp_path, model=tiny, requests=4, tokens=16)) if p.name == "model none"]
    found = run_parts("exact", parts, tmp_path, minutes=5)["parts"]["model none"]
    assert found["ratio_before_update"] == 1.0
    assert 0 < found["gap_to_float32"]["max"] < 0.2
    bench = Bench(spec=TINY, dtype="float32", repeats=1)
    parts = [p for p in update_parts(bench) if p.name == "none reasoning 8192"]
    found = run_parts("update", parts, tmp_path, minutes=5)["parts"]["none reasoning 8192"]
    assert found["tree"]["tokens"] < found["flat"]["tokens"]
    assert found["tree"]["tflops"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they are measured")
def test_what_a_cpu_cannot_do_is_an_error_of_its_part_alone(tmp_path: Path) -> None:
    parts = [p for p in exact_parts(Exactness(tmp_path)) if p.name == "attention bfloat16"]
    assert "error" in run_parts("exact", parts, tmp_path, minutes=5)["parts"]["attention bfloat16"]


@pytest.mark.slow_campaign
def test_decoding_and_trees_are_measured_on_a_real_engine_of_a_tiny_shape(tmp_path: Path) -> None:
    with RandomEngines(tmp_path, "float32", SIZES) as engines:
        algorithm = AlgorithmConfig(group_size=4, initial_rollouts=2, entropy_tokens=4)
        what = Rollouts(engines, {"tiny": TINY}, [Load(2, 8)], (2, 6), 1, algorithm, tasks=2, tool_s=0.01)
        decode, trees, _ = rollout_parts(what)
        found = run_parts("rollout", [decode], tmp_path, minutes=5)["parts"][decode.name]
        assert "error" not in found
        figures = found["2 requests, prompts of 8"]
        assert figures["tokens_per_s"] > 0
        assert figures["floor_ms"] < figures["step_ms"]
        assert len(found["startup_s"]) == len(figures["entropy_costs"]) + 1 == 2
        with_it, without = engines.only(Kind(TINY), Kind(TINY, entropy=False))
        assert "entropy" in _sample(with_it.url)
        assert "entropy" not in _sample(without.url)
        found = run_parts("rollout", [trees], tmp_path, minutes=5)["parts"][trees.name]
        assert not without.alive()
        assert (found["trees"], found["failed"], found["trajectories"]) == (2, 0, 8)
        assert found["prefill_over_unique"] <= 1.05


def _sample(url: str) -> dict[str, object]:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    meta: dict[str, object] = requests.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    return meta


@pytest.mark.slow_campaign
@pytest.mark.usefixtures("one_rank")
def test_pushes_and_lent_memory_are_measured_on_a_real_engine_of_a_tiny_shape(tmp_path: Path) -> None:
    with RandomEngines(tmp_path, "float32", SIZES) as engines:
        what = Pushes(engines, TINY, buckets_mb=(1, 64), repeats=1)
        parts = push_parts(what)[:2]
        done = run_parts("push", parts, tmp_path, minutes=5)
        what.close()
    assert not done["failed"], done
    push, memory = (done["parts"][part.name] for part in parts)
    assert push["tensors_verified"] > 0
    assert max(push["first_probe_gap"], push["probe_gap"], memory["probe_gap_after"]) < 1e-4
    assert push["buckets of 64 MB"]["push_s"][0] > 0
    assert set(push["buckets of 1 MB"]["of_it_s"]) == {"begin", "load", "commit"}
    assert len(memory["release_s"]) == len(memory["resume_s"]) == 1


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B-Instruct"])
def test_a_made_directory_has_the_shape_and_a_word_for_every_token(name: str, tmp_path: Path) -> None:
    spec = KNOWN_MODELS[name]
    write_directory(tmp_path, spec, "bfloat16", sums(4))
    assert ModelSpec.from_hf(tmp_path) == spec
    assert TokenizerCodec(tmp_path).vocabulary_size == spec.vocabulary


def test_a_step_reads_all_weights_once_and_the_keys_and_values_of_every_request() -> None:
    spec = KNOWN_MODELS["Qwen/Qwen3-8B"]
    embedding = 151936 * 4096
    weights = step_bytes(spec, requests=1, context=0, value=2, product=2)
    assert weights == 2 * (8_190_735_360 - embedding)  # the page of the model has 8.19 billion
    one = step_bytes(spec, requests=1, context=1, value=2, product=2) - weights
    assert one == 147456
    assert step_bytes(spec, requests=3, context=5, value=2, product=2) == weights + 15 * one
    assert step_bytes(spec, requests=1, context=0, value=2, product=1) == weights - 36 * (
        4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    )
