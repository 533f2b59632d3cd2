"""Trees, credits and model specs for the actor's tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.microbatch import MicroBatches
from arpo_megatron.actor.schedule import nested_order
from arpo_megatron.actor.training_state import TrainingSnapshot, WeightsOnly
from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.config import JobConfig, ModelConfig, ParallelConfig
from arpo_megatron.models.spec import ModelSpec, MoESpec
from arpo_megatron.packing.packs import last_uses
from arpo_megatron.tree import Role, RolloutTree

VOCABULARY = 32


QWEN3 = ModelSpec(
    family="qwen3",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=32,
    vocabulary=VOCABULARY,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    max_positions=2048,
)
QWEN2 = replace(QWEN3, family="qwen2", tied=True, qkv_bias=True, qk_norm=False)
LLAMA = replace(QWEN3, family="llama", qk_norm=False, kv_heads=4)
QWEN3_MOE = replace(QWEN3, family="qwen3_moe", ffn=12, experts=MoESpec(6, 2, True, 0.001))
SPECS = {
    "tied": replace(QWEN2, layers=4),
    "untied": replace(QWEN3, layers=4),
    "experts": replace(QWEN3_MOE, layers=4),
    "deep": replace(QWEN3, layers=8),
}
"""Specs by name, deep enough for two stages of two chunks each; `deep` for four."""


def job(
    parallel: ParallelConfig | None = None,
    dtype: str = "float32",
    balance: float = 0.0,
    max_length: int = 2048,
    **fields,
) -> JobConfig:
    model = ModelConfig(path=Path("not read here"), dtype=dtype, router_aux_loss=balance, max_length=max_length)
    return JobConfig(name="test", model=model, parallel=parallel or ParallelConfig(), **fields)


def add(tree: RolloutTree, parent: int, role: Role, length: int, rng: np.random.Generator) -> int:
    ids = rng.integers(0, VOCABULARY, length)
    # Old log-probs around those of a fresh model, far enough that every clip is met.
    old = -np.log(VOCABULARY) + rng.normal(0, 0.4, length)
    return tree.add(parent, role, ids, logprobs=old if role is Role.MODEL else None)


@st.composite
def trees(draw: st.DrawFn, max_segments: int = 8, max_tokens: int = 5) -> RolloutTree:
    """Draw any tree: deep, bushy, forked at the prompt, with one-token branches, empty segments or leaves without
    MODEL tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return _any_tree(rng, lambda low, high: draw(st.integers(low, high)), max_segments, max_tokens)


def random_tree(seed: int, max_segments: int = 8, max_tokens: int = 5) -> RolloutTree:
    """Return one of `trees` by seed, so that ranks and references make the same one."""
    rng = np.random.default_rng(seed)
    return _any_tree(rng, lambda low, high: int(rng.integers(low, high + 1)), max_segments, max_tokens)


def _any_tree(
    rng: np.random.Generator, between: Callable[[int, int], int], max_segments: int, max_tokens: int
) -> RolloutTree:
    tree = RolloutTree("case", rng.integers(0, VOCABULARY, between(1, max_tokens)))
    for index in range(1, between(1, max_segments)):
        # Favouring the newest segment makes deep trees as likely as bushy ones.
        parent = index - 1 if between(0, 1) else between(0, index - 1)
        role = Role.TOOL if tree.segments[parent].role is Role.MODEL and between(0, 1) else Role.MODEL
        add(tree, parent, role, between(0, max_tokens), rng)
    return tree


def grown(seed: int, samples: int = 6, length: int = 6, system: int = 0) -> RolloutTree:
    """Return a tree as ARPO grows it: half of the samples from the prompt, the rest forked after tool results.

    The prompt begins with `system` tokens that are equal for all seeds.
    """
    rng = np.random.default_rng(seed)
    shared = np.arange(system) % VOCABULARY
    tree = RolloutTree(f"task-{seed}", np.append(shared, rng.integers(0, VOCABULARY, 2 * length)))
    forks = [0]
    for sample in range(samples):
        parent = 0 if sample < samples // 2 else int(rng.choice(forks))
        call = add(tree, parent, Role.MODEL, int(rng.integers(1, length)), rng)
        result = add(tree, call, Role.TOOL, int(rng.integers(1, length)), rng)
        forks.append(result)
        add(tree, result, Role.MODEL, int(rng.integers(1, length)), rng)
    return tree


def dyadic_advantages(tree: RolloutTree, seed: int) -> np.ndarray:
    """Return one advantage per leaf, of both signs; their sums are exact in float32."""
    return np.random.default_rng(seed).integers(-8, 9, len(tree.leaves())) / 8.0


def plain_credit(tree: RolloutTree, advantages: np.ndarray, weight: float) -> TreeCredit:
    """Compute credit by its definition, leaf by leaf and token by token: sums of w * max(A, 0), w * min(A, 0) and w."""
    starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
    sums = np.zeros((3, tree.unique_tokens), np.float32)
    for leaf, advantage in zip(tree.leaves(), advantages, strict=True):
        for index in tree.path(leaf):
            if tree.segments[index].role is Role.MODEL:
                span = slice(starts[index], starts[index + 1])
                sums[:, span] += np.float32([weight * max(advantage, 0), weight * min(advantage, 0), weight])[:, None]
    return TreeCredit(*sums)


def flat_trees(tree: RolloutTree) -> list[RolloutTree]:
    """Return the tree's trajectories as trees of one path each."""
    flat = []
    for leaf in tree.leaves():
        path = tree.path(leaf)
        single = RolloutTree(tree.task_id, tree.prompt_ids)
        for above, index in enumerate(path[1:]):
            segment = tree.segments[index]
            single.add(above, segment.role, segment.token_ids, logprobs=segment.logprobs)
        flat.append(single)
    return flat


def save(actor: Actor, directory: Path) -> None:
    """Write the state to an existing empty directory; all ranks call it, and it returns when everything is written."""
    write(actor.snapshot(directory))


def save_weights(actor: Actor, directory: Path) -> None:
    """Write the weights alone, like `save`."""
    write(WeightsOnly(actor.chunks).snapshot(directory))


def write(taken: TrainingSnapshot) -> None:
    """Write a snapshot; all ranks call it."""
    written = parallel.gather_objects(taken.write()[0])
    if parallel.is_rank_zero():
        taken.finish(written)
    parallel.broadcast_object(None)  # after the controller has finished


def parameters_of(actor: Actor) -> dict[str, torch.Tensor]:
    """Return float64 copies of the parameters for a reference."""
    return {name: p.detach().double().requires_grad_() for name, p in actor.model.named_parameters()}


def move(actor: Actor) -> None:
    """Change the weights as some steps would."""
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.06)


def assert_gradients(actor: Actor, expected: dict[str, torch.Tensor]) -> None:
    """Assert that every gradient equals that of `expected` (from `parameters_of`) to float32 precision."""
    for name, parameter in actor.model.named_parameters():
        exact = expected[name].grad
        assert (parameter.main_grad - exact).norm() <= 1e-4 * exact.norm() + 1e-9, name


def backward(model, packs, loss, old=True):
    """Run passes in the order that packs need; return the sum of `loss(batch, output)` and the gradients."""
    model.zero_grad()
    old_logprobs = [pack.sampling_logprobs for pack in packs] if old else None
    total, waiting = 0.0, []
    with MicroBatches(packs, old_logprobs) as batches:
        for step, index in nested_order(list(enumerate(last_uses(packs)))):
            if step == "backward":
                waiting.pop().backward()
                continue
            batch = batches.make(index)
            waiting.append(loss(batch, model(*batch.inputs)))
            total = total + waiting[-1].detach()
    return total, gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@torch.no_grad()
def outputs(model, packs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probs and entropies of each pack's targets."""
    with MicroBatches(packs, None) as batches:
        return [model(*batches.make(index).inputs) for index in range(len(packs))]


def batch(seed: int, count: int = 4) -> tuple[list[RolloutTree], list[TreeCredit]]:
    """Return grown trees with advantages of both signs, weighted as in a token mean."""
    forest = [grown(10 * seed + i) for i in range(count)]
    return forest, [plain_credit(t, dyadic_advantages(t, seed + i), 2.0**-7) for i, t in enumerate(forest)]


def other_routes(tree: RolloutTree, seed: int = 5, spec: ModelSpec = QWEN3_MOE) -> list[np.ndarray]:
    """Random experts, int16[tokens, layers, k] per segment; a fifth of the tokens get none (-1)."""
    assert spec.experts is not None
    rng, count = np.random.default_rng(seed), spec.experts.count
    found = []
    for segment in tree.segments:
        order = rng.permuted(np.broadcast_to(np.arange(count), (len(segment), spec.layers, count)), axis=-1)
        routes = order[..., : spec.experts.top_k].astype(np.int16)
        routes[rng.random(len(segment)) < 0.2] = -1
        found.append(routes)
    return found


def routed(tree: RolloutTree, routes: list[np.ndarray]) -> RolloutTree:
    """Return the tree with these routes of its segments."""
    again = RolloutTree(tree.task_id, tree.prompt_ids, routes=routes[0])
    for segment, known in zip(tree.segments[1:], routes[1:], strict=True):
        again.add(segment.parent, segment.role, segment.token_ids, logprobs=segment.logprobs, routes=known)
    return again


def odd(seed: int) -> RolloutTree:
    """Return a tree with rare features: one-token branches, branches at the prompt, a leaf without MODEL tokens,
    depth."""
    rng = np.random.default_rng(seed)
    tree = RolloutTree(f"odd-{seed}", rng.integers(0, VOCABULARY, 3))
    call = add(tree, 0, Role.MODEL, 5, rng)
    result = add(tree, call, Role.TOOL, 4, rng)
    add(tree, result, Role.MODEL, 1, rng)
    add(tree, result, Role.MODEL, 3, rng)
    add(tree, 0, Role.MODEL, 1, rng)
    add(tree, add(tree, 0, Role.MODEL, 2, rng), Role.TOOL, 3, rng)
    end = add(tree, 0, Role.MODEL, 0, rng)
    for _ in range(5):
        end = add(tree, add(tree, end, Role.MODEL, 4, rng), Role.TOOL, 2, rng)
    add(tree, end, Role.MODEL, 2, rng)
    return tree


def join(layout: ParallelConfig) -> None:
    """Set up Megatron's groups for a layout, in place of those of an earlier layout of these ranks."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        # Its shape differs between pipelines and other layouts; a job never has both.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        parallel.create_groups(layout)
        torch.manual_seed(7)
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    else:
        parallel.initialize(layout, seed=7)
