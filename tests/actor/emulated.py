"""Passes and updates with Transformer Engine's layers on a CPU; the ranks of test_te_emulation.py run it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors.torch import save_file

from arpo_megatron.actor import cpu_platform, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.config import AlgorithmConfig, JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.models.spec import ModelSpec, MoESpec
from arpo_megatron.packing.packs import TreePack
from arpo_megatron.tree import RolloutTree
from arpo_megatron.weights.export import hf_tensors
from tests.actor import cases, overlap, proof

WIDE = replace(cases.QWEN3, layers=2, hidden=128, heads=4, kv_heads=2, head_dim=64, ffn=256)
"""FP8 in blocks needs multiples of 128 on a rank, with two tensor-parallel ranks too."""
SPECS = {
    "dense": WIDE,
    "experts": replace(WIDE, family="qwen3_moe", ffn=128, experts=MoESpec(4, 3, True, 0.001)),
}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32"},
    "bfloat16": {"transformer_impl": "transformer_engine"},
    "blockwise": {"fp8": "blockwise"},
    "current": {"fp8": "current"},
}
"""Fields of `ModelConfig` by number format; `plain` has Megatron's own layers."""


def job(layout: ParallelConfig, form: str) -> JobConfig:
    model = ModelConfig(path=Path("not read here"), **FORMATS[form])
    return JobConfig(name="test", model=model, parallel=layout)


def problem(family: str) -> proof.Problem:
    """Return trees to train; with experts they say which ones each token takes, so that rounding does not decide."""
    forest = (*(cases.grown(30 + i) for i in range(2)), cases.odd(3))
    if family == "experts":
        forest = tuple(cases.routed(tree, _all_routes(tree, SPECS[family])) for tree in forest)
    return proof.Problem(forest=forest, algorithm=AlgorithmConfig(), packings=("cut",))


def _all_routes(tree: RolloutTree, spec: ModelSpec) -> list[np.ndarray]:
    """Return experts for every token; `other_routes` leaves some to the router."""
    return [np.where(own < 0, np.arange(own.shape[-1]), own) for own in cases.other_routes(tree, 5, spec)]


def write_weights(root: Path, family: str) -> None:
    """Write random weights that bfloat16 can hold, so that all formats begin with the same numbers."""
    torch.manual_seed(3)
    actor = Actor(job(ParallelConfig(), "plain"), SPECS[family], None, optimizer=None, total_updates=1)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in hf_tensors(actor.chunks, actor.spec)}
    (root / family).mkdir()
    save_file(tensors, root / family / "model.safetensors", metadata={"format": "pt"})


def measure(root: Path, layout: ParallelConfig, form: str, family: str) -> dict[str, Any]:
    """Return log-probs, loss and gradients before an update, and what checkpoints and exports keep of it."""
    own, spec = problem(family), SPECS[family]

    def start() -> Actor:
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=1.0)
        return Actor(job(layout, form), spec, root / family, optimizer=optimizer, total_updates=4)

    actor = start()
    exported = {name: tensor.clone() for name, tensor in hf_tensors(actor.chunks, spec)}
    packs = proof.packed(own, "cut", layout)
    old = actor.logprobs(packs)
    order = np.argsort(np.concatenate([pack.sampling_logprobs for pack in packs]))  # the same in every layout
    found = {
        "layers": sorted({type(module).__name__ for module in actor.model.modules()}),
        "exported": exported,
        "logprobs": torch.from_numpy(np.concatenate(old)[order]),
        "gradients": proof.gradient(actor, own, packs, old),
        "ratio": actor.update(packs, old).ratio_max,
    }
    saved = root / "saved"
    if parallel.is_rank_zero():
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir()
    _barrier()
    cases.save(actor, saved)
    resumed = start()
    resumed.load(saved)
    found["next"] = [_after_update(each, packs) for each in (actor, resumed)]
    return found


def _after_update(actor: Actor, packs: list[TreePack]) -> dict[str, Any]:
    stats = actor.update(packs, None)
    tensors = {name: tensor.clone() for name, tensor in hf_tensors(actor.chunks, actor.spec)}
    return {"gradient norm": stats.grad_norm, **tensors}


def overlapped(pairs: list[tuple[dict[str, Any], str]]) -> None:
    """Assert that the overlap of the reduction changes no update of TE's grouped experts.

    Args:
        pairs: fields of `ParallelConfig` for two ranks, and a number format.
    """
    spec = replace(SPECS["experts"], experts=MoESpec(4, 2, True, 0.001))  # all tokens of a layer fit on one rank
    overlap.check([(job(ParallelConfig(**fields), form), spec) for fields, form in pairs])


def add_in_any_order(root: Path) -> None:
    """Write the largest ratio before an update of a mixture to `root / "ratios"`, by fusion of the permutation."""
    cases.join(ParallelConfig())
    write_weights(root, "experts")
    own, ratios = problem("experts"), {}
    for fused in (True, False):
        actor = Actor(
            job(ParallelConfig(), "bfloat16"),
            SPECS["experts"],
            root / "experts",
            optimizer=OptimizerConfig(),
            total_updates=4,
        )
        assert actor.model.config.moe_permute_fusion
        actor.model.config.moe_permute_fusion = fused
        packs = proof.packed(own, "several", ParallelConfig())
        with random_order():
            ratios[fused] = actor.update(packs, actor.logprobs(packs)).ratio_max
    torch.save(ratios, root / "ratios")
    parallel.destroy()


@contextmanager
def random_order() -> Iterator[None]:
    """Make `scatter_add_` of rows add in random order inside the context and round after each, as CUDA's atomics do."""

    original = torch.Tensor.scatter_add_

    def add(target: torch.Tensor, dimension: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if dimension:  # each row has one index there
            return original(target, dimension, index, source)
        order = torch.randperm(len(index))
        rows, values = index[order, 0], source[order]
        # The n-th addition to each row is in round n, so that no round adds twice to one row.
        earlier = torch.tril(rows[:, None] == rows[None], -1).sum(1)
        for turn in range(int(earlier.max()) + 1):
            target.index_add_(0, rows[earlier == turn], values[earlier == turn])
        return target

    with patch.object(torch.Tensor, "scatter_add_", add):
        yield


def refuse() -> None:
    """Assert that products refuse the operands that a GPU refuses, and that blocks round by their scale."""
    cpu_platform.install()
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor import Float8BlockQuantizer
    from transformer_engine_torch import DType

    def quantized(rows: int, columns: int, dimension: int = 1, *, by_columns: bool = True) -> Any:
        quantizer = Float8BlockQuantizer(
            DType.kFloat8E4M3, rowwise=True, columnwise=by_columns, block_scaling_dim=dimension
        )
        return quantizer(torch.randn(rows, columns, dtype=torch.bfloat16))

    weight, values = quantized(256, 128, 2), quantized(64, 128)
    exact = values.dequantize(dtype=torch.float32) @ weight.dequantize(dtype=torch.float32).t()
    torch.testing.assert_close(general_gemm(weight, values, torch.float32)[0], exact)
    for left, right, layout, reason in (
        (quantized(256, 120, 2), quantized(64, 120), "TN", "multiples of 8 and 16"),
        (weight, quantized(60, 128), "TN", "multiples of 8 and 16"),
        (weight, quantized(64, 128, 2), "TN", "both operands have 128 x 128 blocks"),
        (quantized(256, 128, 2, by_columns=False), quantized(64, 256), "NN", "needs the copy by columns"),
    ):
        with pytest.raises(AssertionError, match=reason):
            general_gemm(left, right, torch.float32, layout=layout)
    source = torch.randn(128, 128, dtype=torch.bfloat16)
    rounded = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)(source)
    # Three bits of mantissa; below 2**-6 of the scaled values FP8 has fixed steps.
    step = torch.maximum(source.float().abs() * 2.0**-4, source.float().abs().amax(1, keepdim=True) * 2.0**-17)
    assert ((rounded.dequantize(dtype=torch.float32) - source.float()).abs() <= step).all()


def compute(root: Path, layouts: dict[str, dict[str, Any]], runs: list[tuple[str, str, str]]) -> None:
    """Write what `measure` returns to `{layout} {form} {family}.pt` under `root`, for each run in order.

    Args:
        root: exists; gets the weights too.
        layouts: fields of `ParallelConfig` by name, all for this number of ranks.
        runs: names of layout, number format and family.
    """
    for name, form, family in runs:
        layout = ParallelConfig(**layouts[name])
        cases.join(layout)
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        if not (root / family).exists():
            assert layout.world_size == 1
            write_weights(root, family)
        with proof.small_blocks(layout):
            found = measure(root, layout, form, family)
        if parallel.is_rank_zero():
            torch.save(found, root / f"{name} {form} {family}.pt")
        _barrier()
    parallel.destroy()


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
