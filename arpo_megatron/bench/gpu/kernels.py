"""Core attention alone: errors of FlexAttention's kernels against float64, and speeds against flash attention."""

from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from arpo_megatron.actor.flex_attention import flex_plan, flex_tree_attention
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.gpu.measure import Figures, Measurements, timed
from arpo_megatron.config import AttentionBackend
from arpo_megatron.hardware.placement import check_flash
from arpo_megatron.packing.flops import BACKWARD
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES, flattened

HEADS, GROUPS, DIM = 32, 8, 128
"""Attention of Qwen3 4B and 8B."""
REPEATS = 10
Tensors = tuple[Tensor, Tensor, Tensor]


def kernel_measurements() -> Measurements:
    """Return errors in float32 and bfloat16, the leak between siblings, and the speed on each mix.

    Those with `flash` in their name are of `model.attention_backend=flash`.
    """
    return {
        "error float32": partial(_errors, torch.float32),
        "error bfloat16": partial(_errors, torch.bfloat16),
        "error flash": partial(_errors, torch.bfloat16, "flash"),
        "sibling leak": _sibling_leak,
        **{f"speed {mix}": partial(_speeds, mix) for mix in MIXES},
        **{f"speed flash {mix}": partial(_speeds, mix, "flash") for mix in MIXES},
    }


def _pack(mix: str) -> TreePack:
    tree = MIXES[mix].tree(0, 1024)
    (pack,) = pack_trees([tree], supervised_credit([tree]), token_budget=10**9)
    return pack


def _inputs(tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> Tensors:
    draw = torch.Generator("cuda").manual_seed(tokens)
    query, key, value = (
        torch.randn(tokens, count, dim, device="cuda", generator=draw).to(dtype).requires_grad_()
        for count in (heads, groups, groups)
    )
    return query, key, value


def _gradients(output: Tensor, weights: Tensor, inputs: Tensors) -> tuple[Tensor, ...]:
    return output, *torch.autograd.grad((output * weights.to(output.dtype)).sum(), inputs)


def _errors(dtype: torch.dtype, backend: AttentionBackend = "auto") -> Figures:
    """Return relative errors of output and gradients against dense attention in float64."""
    if backend == "flash":
        check_flash()
    pack = _pack("reasoning")
    heads, groups, dim = 4, 2, 64
    inputs = _inputs(len(pack), heads, groups, dim, dtype)
    weights = torch.randn(len(pack), heads, dim, device="cuda", dtype=torch.float64)
    plan = flex_plan(pack.subtree_end, np.arange(len(pack)), "cuda")
    found = _gradients(flex_tree_attention(*inputs, plan, dim**-0.5, backend), weights, inputs)
    query, key, value = (t.detach().double().requires_grad_() for t in inputs)
    end = torch.from_numpy(pack.subtree_end.astype(np.int64)).cuda()
    at = torch.arange(len(pack), device="cuda")
    mask = (at <= at[:, None]) & (at[:, None] < end)
    outputs = []
    for head in range(heads):  # one at a time: scores in float64 are large
        group = head // (heads // groups)
        scores = (query[:, head] @ key[:, group].t() * dim**-0.5).masked_fill(~mask, -torch.inf)
        outputs.append(scores.softmax(-1) @ value[:, group])
    expected = _gradients(torch.stack(outputs, 1), weights, (query, key, value))
    names = ("output", "query_gradient", "key_gradient", "value_gradient")
    errors = {name: _relative_l2(a, b) for name, a, b in zip(names, found, expected, strict=True)}
    return {"relative_l2": errors, "tokens": len(pack)}


def _relative_l2(found: Tensor, expected: Tensor) -> float:
    return float(f"{float((found.double() - expected).norm() / expected.norm()):.3e}")


def _sibling_leak() -> Figures:
    """Change one branch's last key, and count the tokens of other branches whose output changes."""
    pack = _pack("reasoning")
    plan = flex_plan(pack.subtree_end, np.arange(len(pack)), "cuda")
    query, key, value = (t.detach() for t in _inputs(len(pack), HEADS, GROUPS, DIM, torch.bfloat16))
    before = flex_tree_attention(query, key, value, plan, DIM**-0.5)
    leaf = int(np.flatnonzero(pack.subtree_end == np.arange(len(pack)) + 1)[0])  # the end of the first branch
    key[leaf], value[leaf] = 100.0, 100.0
    changed = (flex_tree_attention(query, key, value, plan, DIM**-0.5) != before).flatten(1).any(1)
    changed[leaf] = False
    return {"other_tokens_changed": int(changed.sum())}


def _speeds(mix: str, backend: AttentionBackend = "auto") -> Figures:
    """Compare FlexAttention on the mix's tree with flash attention on its flattened trajectories."""
    if backend == "flash":
        check_flash()
    pack = _pack(mix)
    plan = flex_plan(pack.subtree_end, np.arange(len(pack)), "cuda")
    lengths = [single.unique_tokens for single in flattened([MIXES[mix].tree(0, 1024)])]
    inputs = _inputs(len(pack), HEADS, GROUPS, DIM, torch.bfloat16)
    tree = _forward_backward_s(lambda: flex_tree_attention(*inputs, plan, DIM**-0.5, backend), inputs)
    sequences = [_inputs(length, HEADS, GROUPS, DIM, torch.bfloat16) for length in lengths]
    flash = [_forward_backward_s(partial(_flash, *sequence), sequence) for sequence in sequences]
    flat = [sum(times) for times in zip(*flash, strict=True)]
    flat_pairs = sum(length * (length + 1) // 2 for length in lengths)
    return {
        "tokens": len(pack),
        "pairs_computed_over_useful": plan.pairs / pack.attention_pairs,
        "tree_flex": _speed(tree, pack.attention_pairs),
        "flat_flash": _speed(flat, flat_pairs),
        "time_ratio": sum(tree) / sum(flat),
    }


def _speed(seconds: list[float], pairs: int) -> Figures:
    flops = 4.0 * HEADS * DIM * pairs * (1 + BACKWARD)
    return {
        "forward_ms": round(1e3 * seconds[0], 3),
        "backward_ms": round(1e3 * seconds[1], 3),
        "useful_tflops": round(flops / sum(seconds) / 1e12, 1),
    }


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _forward_backward_s(forward: Callable[[], Tensor], inputs: Tensors) -> list[float]:
    """Return the median seconds of a forward and of a backward pass."""
    output = forward()  # compiles
    weights = torch.randn_like(output)
    torch.autograd.grad(output, inputs, weights)
    forwards, backwards = [], []
    for _ in range(REPEATS):
        forwards.append(timed(forward))
        output = forward()
        backwards.append(timed(partial(torch.autograd.grad, output, inputs, weights)))
    return [median(forwards), median(backwards)]
