"""Script of test_memory.py: measure the memory of one rank for several layouts, and print one JSON object.

Arguments: what to measure (counted, held, kept); `--worst` prints the worst agreement of each kind instead. Groups have
torch's `fake` backend, whose collectives return at once without communication. So one process has exactly the memory of
a rank among others.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from arpo_megatron.actor import cpu_platform, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.attention_plan import plan_attention
from arpo_megatron.actor.microbatch import ContextShard, MicroBatches
from arpo_megatron.actor.model import build_chunks
from arpo_megatron.actor.optimizer_state import inner_optimizers
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec, MoESpec
from arpo_megatron.packing.packs import TreePack, pack_trees
from arpo_megatron.plan.activations import LocalCalls, Tokens, pass_bytes
from arpo_megatron.plan.memory import static_parts
from arpo_megatron.plan.parameters import stage_parameters
from arpo_megatron.plan.synthetic_trees import Mix

QWEN3 = replace(
    KNOWN_MODELS["Qwen/Qwen3-8B"], layers=4, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=384, vocabulary=512
)
QWEN2 = replace(QWEN3, family="qwen2", tied=True, qkv_bias=True, qk_norm=False)
MIXTURE = replace(QWEN3, family="qwen3_moe", ffn=96, experts=MoESpec(8, 2, True, 0.001))
SEQUENCE = {"tensor": 2, "sequence": True}

REAL = [
    ("Qwen/Qwen3-14B", ParallelConfig(tensor=4, pipeline=2, data=2)),
    ("Qwen/Qwen3-14B", ParallelConfig(**SEQUENCE, pipeline=4, virtual_pipeline=2, data=2)),
    ("Qwen/Qwen3-32B", ParallelConfig(tensor=8, data=2)),
    ("Qwen/Qwen3-30B-A3B", ParallelConfig(tensor=4, sequence=True, data=4, expert=8)),
    ("Qwen/Qwen3-30B-A3B", ParallelConfig(tensor=4, sequence=True, pipeline=4)),
    ("Qwen/Qwen2.5-3B-Instruct", ParallelConfig(tensor=2, pipeline=2, data=4)),
    ("Qwen/Qwen2.5-3B-Instruct", ParallelConfig(tensor=2, data=8)),
]
"""Layouts of 16 ranks, on the meta device."""
HELD = [
    (QWEN3, "float32", ParallelConfig(data=4)),
    (QWEN3, "bfloat16", ParallelConfig(data=4)),
    (QWEN3, "float32", ParallelConfig(data=4, distributed_optimizer=True)),
    (QWEN2, "bfloat16", ParallelConfig(**SEQUENCE, data=2, distributed_optimizer=True)),
    (QWEN2, "bfloat16", ParallelConfig(pipeline=2, data=2, distributed_optimizer=True)),
    (QWEN3, "bfloat16", ParallelConfig(context=2, data=2, distributed_optimizer=True)),
    (MIXTURE, "bfloat16", ParallelConfig(expert=2, data=4, distributed_optimizer=True)),
]
"""Layouts of 4 ranks, in memory."""
PASSES = [
    (QWEN3, "float32", ParallelConfig(data=4)),
    (QWEN3, "bfloat16", ParallelConfig(data=4)),
    (QWEN3, "bfloat16", ParallelConfig(data=4, recompute="full")),
    (QWEN3, "bfloat16", ParallelConfig(data=4, recompute="full", recompute_layers=2)),
    (QWEN3, "bfloat16", ParallelConfig(data=4, recompute="selective", recompute_modules=("core_attn",))),
    (QWEN3, "bfloat16", ParallelConfig(data=4, recompute="selective")),
    (QWEN2, "float32", ParallelConfig(**SEQUENCE, data=2, recompute="selective")),
    (QWEN2, "float32", ParallelConfig(tensor=2, data=2)),
    (QWEN2, "bfloat16", ParallelConfig(**SEQUENCE, data=2)),
    (QWEN3, "float32", ParallelConfig(**SEQUENCE, data=2, recompute="full")),
    (MIXTURE, "float32", ParallelConfig(data=4)),
    (MIXTURE, "bfloat16", ParallelConfig(data=4)),
]


@contextmanager
def laid_out(layout: ParallelConfig, rank: int) -> Iterator[None]:
    """Run as rank `rank` of the layout."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.world_size))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel.create_groups(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def counted() -> Iterator[dict[str, Any]]:
    """Compare the parameters of the first and the last pipeline stage."""
    for name, layout in REAL:
        for stage, rank in ((0, 0), (layout.pipeline - 1, layout.world_size - 1)):
            with laid_out(layout, rank), torch.device("meta"):
                chunks = build_chunks(KNOWN_MODELS[name], layout, "bfloat16", initialize=False)
                found = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
            yield {
                "of": f"parameters: {name} stage {stage}",
                "measured": found,
                "planned": stage_parameters(KNOWN_MODELS[name], layout, stage).total,
            }


def held() -> Iterator[dict[str, Any]]:
    """Compare the bytes of weights, gradient buffers and optimizer state of rank 0."""
    for spec, dtype, layout in HELD:
        config = JobConfig(name="test", model=ModelConfig(hub_id="not read", dtype=dtype), parallel=layout)
        with laid_out(layout, 0):
            actor = Actor(config, spec, None, optimizer=OptimizerConfig(), total_updates=2)
            buffers = [b for w in actor._wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
            states = [state for inner in inner_optimizers(actor.optimizer) for state in inner.state.values()]
            parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
            masters = [
                p
                for inner in inner_optimizers(actor.optimizer)
                for group in inner.param_groups
                for p in group["params"]
                if p.dtype != parameters[0].dtype
            ]
            measured = {
                "weights": sum(p.nbytes for p in parameters),
                "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
                "optimizer": sum(value.nbytes for state in states for value in state.values() if value.dim())
                + sum(master.nbytes for master in masters),
            }
        planned = static_parts(config, spec, 0)
        for name, size in measured.items():
            yield {"of": f"{name}: {spec.family} {dtype} {layout}", "measured": size, "planned": planned[name]}


def kept() -> Iterator[dict[str, Any]]:
    """Compare the bytes that a forward pass keeps on a rank."""
    tree = Mix(samples=4, initial=2, calls=2, prompt=64, segment=(100, 100), result=(60, 60)).tree(0, 500)
    (pack,) = pack_trees([tree], supervised_credit([tree]), token_budget=10**6)
    for spec, dtype, layout in PASSES:
        with laid_out(layout, 0):
            measured = after_forward(spec, dtype, layout, pack)
        planned = pass_bytes(
            spec,
            layout,
            Tokens(len(pack), len(pack)),
            len(pack.predictors),
            value=4 if dtype == "float32" else 2,
            last=True,
            calls=LocalCalls.of(plan_attention(pack.subtree_end)),
        )
        yield {
            "of": f"activations, recompute {layout.recompute}: {spec.family} {dtype} {layout}",
            "measured": measured,
            "planned": planned,
        }


def after_forward(spec: ModelSpec, dtype: str, layout: ParallelConfig, pack: TreePack) -> int:
    """Return the allocator's byte count."""
    (chunk,) = build_chunks(spec, layout, dtype)
    place = ContextShard(0, 1, layout.tensor if layout.sequence else 1)
    with MicroBatches([pack], None, place) as batches:
        batch = batches.make(0)
        return allocated_by(lambda: chunk(*batch.inputs, 1.0))


def allocated_by(work: Callable[[], object]) -> int:
    """Return the bytes that stay allocated while the result of `work` is alive."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept_alive = work()
    events = profiler.profiler.kineto_results.events()
    del kept_alive
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def worst(measured: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line per kind with the largest deviation of plan from measurement."""
    off: dict[str, list[float]] = {}
    for row in (row for rows in measured.values() for row in rows):
        off.setdefault(row["of"].partition(":")[0], []).append(abs(row["planned"] / row["measured"] - 1))
    return "\n".join(f"{kind}: {len(found)} ranks, within {max(found):.3%}" for kind, found in off.items())


if __name__ == "__main__":
    parallel.silence_import_warnings()
    cpu_platform.install()
    torch.set_num_threads(1)
    new_group = dist.new_group
    dist.new_group = lambda *ranks, **options: new_group(*ranks, **{**options, "backend": "fake"})
    parts = {"counted": counted, "held": held, "kept": kept}
    asked = [name for name in sys.argv[1:] if name != "--worst"]
    measured = {name: list(parts[name]()) for name in asked}
    print(worst(measured) if "--worst" in sys.argv else json.dumps(measured))
