"""What stands a GPU's measurements beside the planner's figures, on a CPU with tiny models."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.bench.gpu.journal import run_parts
from arpo_megatron.bench.gpu.largest import SIZES, Largest, chosen_plan, largest_parts
from arpo_megatron.bench.gpu.profile import account, device_spans, group_of, profile_parts
from arpo_megatron.bench.gpu.step import Step, step_parts
from arpo_megatron.bench.gpu.trainer import in_process
from arpo_megatron.bench.gpu.update import QWEN3_4B, Bench
from arpo_megatron.config import JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.plan import GPUS

TINY = replace(QWEN3_4B, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocabulary=960)
MADE = ModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=64, vocabulary_size=512, max_length=128)


def test_a_trainer_is_measured_by_part_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = in_process(JobConfig(name="t", platform="cpu", model=MADE), tmp_path)
    for part in ("weights", "gradients", "optimizer"):
        assert found["gib"][part]["ratio"] == pytest.approx(1.0), part
    assert found["step_s"]["measured"] > 0


def test_what_fails_there_is_told_in_a_line(tmp_path: Path) -> None:
    offload = OptimizerConfig(offload=True)  # without a GPU
    layout = ParallelConfig(distributed_optimizer=True)
    config = JobConfig(name="t", platform="cpu", model=MADE, parallel=layout, optimizer=offload)
    with pytest.raises(RuntimeError, match=r"the trainer ended with exit code 1: \w+Error"):
        in_process(config, tmp_path)


def test_a_model_whose_state_the_host_has_no_room_for_is_measured_without_it(tmp_path: Path) -> None:
    small_host = replace(GPUS["h200"], gpus=1, host_memory=1.0)
    parts = largest_parts(Largest(tmp_path, sizes=("tiny",), made=MADE, hardware=small_host))
    found = run_parts("largest", parts, tmp_path, minutes=5)["parts"]["tiny"]
    assert not found["trains"]
    assert found["plan"]["gpu_has_room"]
    assert found["gib"]["optimizer"]["measured"] == 0.0
    assert found["gib"]["gradients"]["ratio"] == pytest.approx(1.0, abs=0.02)  # Megatron fills a bucket up


def test_the_planner_says_how_much_of_the_state_goes_to_the_host(tmp_path: Path) -> None:
    def shares(gigabytes: float) -> dict[str, tuple[bool, float]]:
        host = replace(GPUS["h200"], gpus=1, host_memory=gigabytes * 1e9)
        found = {size: chosen_plan(Largest(tmp_path), size, host) for size in SIZES}
        return {
            size[11:]: (trains, plan.config.sft.optimizer.offload_fraction) for size, (plan, trains) in found.items()
        }

    assert shares(137) == {"4B": (True, 1.0), "8B": (True, 0.5), "14B": (False, 1.0)}
    assert shares(1000) == {"4B": (True, 1.0), "8B": (True, 1.0), "14B": (True, 1.0)}


@pytest.mark.slow_campaign
@pytest.mark.timeout(1200)  # engine, tools and trainer are started
def test_a_whole_job_stands_beside_its_plan(tmp_path: Path) -> None:
    step = Step(tmp_path, spec=TINY, dtype="float32", steps=2, response=256, tasks=4, samples=4)
    (job,) = [part for part in step_parts(step) if part.name == "job"]
    found = run_parts("step", [job], tmp_path, minutes=10)["parts"]["job"]
    assert "error" not in found, found["error"]
    for phase in ("rollout", "logprobs", "update", "push", "step"):
        assert found["phases"][phase]["measured"] > 0, phase
        assert found["phases"][phase]["planned"] > 0, phase
    assert found["trees"]["forks"] > 0
    assert found["trees"]["unique_tokens"]["ratio"] == pytest.approx(1.0, abs=0.5)  # as the planner draws them
    assert found["gib"]["trainer_tensors"]["planned"] > 0
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.usefixtures("one_rank")
def test_a_profile_is_taken_and_kept(tmp_path: Path) -> None:
    bench = Bench(
        spec=replace(TINY, layers=1, hidden=32, head_dim=8, ffn=64, vocabulary=1024), dtype="float32", repeats=1
    )
    parts = [part for part in profile_parts(bench, tmp_path) if part.name == "none flat 8192"]
    found = run_parts("profile", parts, tmp_path, minutes=5)["parts"]["none flat 8192"]
    assert "error" not in found, found["error"]
    assert len(found["top"]) == 10
    assert sum(found["groups"].values()) == pytest.approx(1.0, abs=0.01)
    assert 0.0 <= found["idle_share"] < 1.0
    assert Path(found["trace"]).stat().st_size > 0


def test_time_is_the_device_s_and_what_overlaps_counts_once(tmp_path: Path) -> None:
    def event(category: str, name: str, start: float, length: float, thread: int = 0) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread}

    events = [
        event("cpu_op", "aten::mm", 0, 100),
        event("gpu_user_annotation", "MLP", 0, 100),
        event("kernel", "nvjet_tst_128x256", 10, 40),
        event("kernel", "ncclDevKernel_AllReduce", 30, 40, 7),  # beside it, on another stream
        event("gpu_memcpy", "Memcpy DtoH", 90, 10),
        {"ph": "i", "cat": "kernel", "name": "a moment", "ts": 5},
    ]
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = account(device_spans(trace), step_us=140.0)
    assert found["kernels"] == 3
    assert found["busy_s"] == pytest.approx(70e-6, abs=5e-5)
    assert found["idle_share_profiled"] == pytest.approx(20 / 90, abs=1e-4)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["gaps"]["count"] == 1
    assert found["groups"] == {"product": 0.4444, "communication": 0.4444, "copy": 0.1111}
    assert group_of("triton_tem_fused_flex_attention_backward_zeros_0") == "attention"
    assert group_of("void transformer_engine::rmsnorm_fwd_tuned_kernel<...>") == "norm"
