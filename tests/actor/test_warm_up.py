"""Attention is compiled before the passes of a step: each pair of lengths once, divided among a machine's ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from arpo_megatron.actor import parallel, warm_up
from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.actor.microbatch import ContextShard, _Local
from arpo_megatron.actor.warm_up import AttentionKernels, Lengths
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import ParallelConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import load_spec
from arpo_megatron.packing.layout import TreePack, padded_lengths
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES
from arpo_megatron.plan.workload import largest, typical
from tests.actor import cases


def packs_of(trees: int = 6) -> list[TreePack]:
    forest = [MIXES["reasoning"].tree(seed, 1000) for seed in range(trees)]
    return pack_trees(forest, supervised_credit(forest), token_budget=1024)


def kernels_of(context: int = 1) -> AttentionKernels:
    return AttentionKernels.of(cases.job(ParallelConfig(context=context)), cases.QWEN3)


@pytest.mark.parametrize("context", [1, 2])
def test_lengths_are_those_of_the_passes(context: int) -> None:
    kernels = kernels_of(context)
    for pack in packs_of():
        met = set()
        for rank in range(context):
            members = _Local.of(pack, ContextShard(rank, context, cost=kernels.cost)).members
            plan = flex_plan(pack.subtree_end, members[members >= 0])
            if plan.mask is not None:
                met.add(tuple(plan.mask.shape[-2:]))
        assert kernels.lengths(pack) == met


class Recorded(AttentionKernels):
    """Notes what it would compile."""

    __slots__ = ("compiled",)

    def compile(self, lengths: Lengths) -> None:
        self.compiled.append(lengths)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend to be the second of three ranks of a machine; return the log."""
    monkeypatch.setattr(parallel, "device", lambda: torch.device("cuda", 1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    return []


def test_ranks_of_a_machine_divide_the_lengths(on_cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, packs = Recorded(4, 2, 8, torch.bfloat16), packs_of()
    kernels.compiled, before = [], []
    monkeypatch.setattr(parallel, "gather_objects", lambda value: before.append(len(kernels.compiled)))
    kernels.prepare(packs, on_cuda.append)
    every = sorted({lengths for pack in packs for lengths in kernels.lengths(pack)})
    assert len(every) > 3
    assert kernels.compiled[: before[0]] == every[1::3], "its own ones, before it waits for the other ranks"
    assert sorted(kernels.compiled) == every
    assert on_cuda[0].startswith(f"attention kernels: 1 of this rank's {before[0]} compiled")
    assert on_cuda[-1].startswith(f"attention kernels: {len(every)} ready")
    kernels.prepare(packs, on_cuda.append)
    assert len(kernels.compiled) == len(every), "nothing is compiled twice"


def test_kernels_are_counted_and_not_compiled_on_a_cpu() -> None:
    kernels, packs = Recorded(4, 2, 8, torch.bfloat16), packs_of()
    kernels.compiled = []
    kernels.prepare(packs[:2], print)
    kernels.prepare(packs[1:], print)
    assert not kernels.compiled
    assert kernels.needed == {lengths for pack in packs for lengths in kernels.lengths(pack)}


def test_compiled_lengths_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = kernels_of().lengths(packs_of()[1]), []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: object, scale: float, backend):
        seen.append((len(query), len(key), query.requires_grad, torch.is_grad_enabled(), plan.mask.shape[-2:], backend))
        return (query.sum() + key.sum() + value.sum()) * torch.ones_like(query)

    monkeypatch.setattr(warm_up, "flex_tree_attention", attention)
    job = cases.job(dtype="bfloat16")
    job = replace(job, model=replace(job.model, attention_backend="flash"))
    for lengths in asked:
        AttentionKernels.of(job, cases.QWEN3).compile(lengths)
    assert seen == [(*lengths, True, gradient, lengths, "flash") for lengths in asked for gradient in (False, True)]


RECIPES = [name for name in resolve.recipe_names() if not resolve.resolve(name).model.is_generated]


@pytest.mark.parametrize("recipe", RECIPES)
def test_packs_of_a_recipe_need_few_kernels(recipe: str) -> None:
    """docs/guides/gpu.md states the bound."""
    job = resolve.resolve(recipe)
    kernels = AttentionKernels.of(job, load_spec(job.model))
    met: set[Lengths] = set()
    for work in (typical(job), largest(job)):
        trees = list(work.trees)
        packs = pack_trees(trees, supervised_credit(trees), token_budget=job.train.token_budget)
        met.update(*(kernels.lengths(pack) for pack in packs))
    assert 1 <= len(met) <= 17
    assert all(padded_lengths(*lengths) == lengths for lengths in met)
    assert max(queries for queries, _ in met) <= 1.5 * job.train.token_budget


def test_heads_are_those_of_a_tensor_parallel_rank() -> None:
    job = resolve.resolve("deepsearch_14b")
    kernels = AttentionKernels.of(job, load_spec(job.model))
    spec, tensor = load_spec(job.model), job.parallel.tensor
    assert (kernels.heads, kernels.groups) == (spec.heads // tensor, spec.kv_heads // tensor)
    assert np.isclose(kernels.head_dim, 128)
