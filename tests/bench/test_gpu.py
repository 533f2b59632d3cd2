"""What is measured on a GPU machine is tried here: everything up to the first use of a GPU, and the whole on a CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arpo_megatron.bench.gpu.exact import Exactness, exact_parts
from arpo_megatron.bench.gpu.journal import Part, run_parts
from arpo_megatron.bench.gpu.update import QWEN3_4B, Bench, update_parts
from arpo_megatron.config import ModelConfig


@pytest.mark.parametrize("command", ["demo", "exact", "update", "step", "largest", "profile"])
def test_a_dry_run_builds_every_part_and_records_nothing(command: str, tmp_path: Path) -> None:
    words = ["bench", "gpu", command, "--dry", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "arpo_megatron.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["dry"]
    assert not answer.get("failed")
    assert not answer.get("left")
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
    shape = replace(QWEN3_4B, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, vocabulary=1024)
    bench = Bench(shape=shape, dtype="float32", repeats=1)
    parts = [p for p in update_parts(bench) if p.name == "none reasoning 8192"]
    found = run_parts("update", parts, tmp_path, minutes=5)["parts"]["none reasoning 8192"]
    assert found["tree"]["tokens"] < found["flat"]["tokens"]
    assert found["tree"]["tflops"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they are measured")
def test_what_a_cpu_cannot_do_is_an_error_of_its_part_alone(tmp_path: Path) -> None:
    parts = [p for p in exact_parts(Exactness(tmp_path)) if p.name == "attention bfloat16"]
    assert "error" in run_parts("exact", parts, tmp_path, minutes=5)["parts"]["attention bfloat16"]
