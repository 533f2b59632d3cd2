"""Core attention alone: errors of the FlexAttention kernel against float64, and its speed against flash attention."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from arpo_megatron.actor.flex_attention import flex_plan, flex_tree_attention
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.gpu.journal import Figures, Part, timed
from arpo_megatron.packing.flops import BACKWARD
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES, flattened

HEADS, GROUPS, DIM = 32, 8, 128
"""Of Qwen3 4B and 8B."""
REPEATS = 10
Tensors = tuple[Tensor, Tensor, Tensor]


def error_parts() -> list[Part]:
    """Outputs and gradients in float32 and bfloat16 against float64, and whether branches can see each other."""
    return [
        *(
            Part(f"attention {str(dtype).removeprefix('torch.')}", partial(_prepare_errors, dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        Part("attention sibling leak", _prepare_leak),
    ]


def speed_parts() -> list[Part]:
    """FlexAttention on each mix's tree, and flash attention on the flattened trajectories, forward and backward."""
    return [Part(f"attention {name}", partial(_prepare_speed, name)) for name in MIXES]


def _pack(name: str) -> TreePack:
    tree = MIXES[name].tree(0, 1024)
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


def _prepare_errors(dtype: torch.dtype) -> Callable[[], Figures]:
    pack = _pack("reasoning")
    position = np.arange(len(pack))
    flex_plan(pack.subtree_end, position)

    def measure() -> Figures:
        heads, groups, dim = 4, 2, 64
        inputs = _inputs(len(pack), heads, groups, dim, dtype)
        weights = torch.randn(len(pack), heads, dim, device="cuda", dtype=torch.float64)
        plan = flex_plan(pack.subtree_end, position, "cuda")
        found = _gradients(flex_tree_attention(*inputs, plan, dim**-0.5), weights, inputs)
        query, key, value = (t.detach().double().requires_grad_() for t in inputs)
        end = torch.from_numpy(pack.subtree_end.astype(np.int64)).cuda()
        at = torch.arange(len(pack), device="cuda")
        mask = (at <= at[:, None]) & (at[:, None] < end)
        outputs = []
        for head in range(heads):  # one at a time: scores in float64 are large
            group = head // (heads // groups)
            scores = (query[:, head] @ key[:, group].t() * dim**-0.5).masked_fill(~mask, -torch.inf)
            outputs.append(scores.softmax(-1) @ value[:, group])
        right = _gradients(torch.stack(outputs, 1), weights, (query, key, value))
        names = ("output", "query_gradient", "key_gradient", "value_gradient")
        errors = {n: _relative(a, b) for n, a, b in zip(names, found, right, strict=True)}
        return {"relative_l2": errors, "tokens": len(pack)}

    return measure


def _relative(found: Tensor, right: Tensor) -> float:
    return float(f"{float((found.double() - right).norm() / right.norm()):.3e}")


def _prepare_leak() -> Callable[[], Figures]:
    pack = _pack("reasoning")

    def measure() -> Figures:
        plan = flex_plan(pack.subtree_end, np.arange(len(pack)), "cuda")
        query, key, value = (t.detach() for t in _inputs(len(pack), HEADS, GROUPS, DIM, torch.bfloat16))
        before = flex_tree_attention(query, key, value, plan, DIM**-0.5)
        leaf = int(np.flatnonzero(pack.subtree_end == np.arange(len(pack)) + 1)[0])  # the end of the first branch
        key[leaf], value[leaf] = 100.0, 100.0
        moved = (flex_tree_attention(query, key, value, plan, DIM**-0.5) != before).flatten(1).any(1)
        moved[leaf] = False
        return {"other_tokens_that_moved": int(moved.sum())}

    return measure


def _prepare_speed(name: str) -> Callable[[], Figures]:
    pack = _pack(name)
    plan = flex_plan(pack.subtree_end, np.arange(len(pack)))
    lengths = [single.unique_tokens for single in flattened([MIXES[name].tree(0, 1024)])]

    def measure() -> Figures:
        on_gpu = flex_plan(pack.subtree_end, np.arange(len(pack)), "cuda")
        inputs = _inputs(len(pack), HEADS, GROUPS, DIM, torch.bfloat16)
        tree = _speed(lambda: flex_tree_attention(*inputs, on_gpu, DIM**-0.5), inputs)
        sequences = [_inputs(length, HEADS, GROUPS, DIM, torch.bfloat16) for length in lengths]
        flash = [_speed(partial(_flash, *sequence), sequence) for sequence in sequences]
        flat_pairs = sum(length * (length + 1) // 2 for length in lengths)
        figures: dict[str, Any] = {"tokens": len(pack), "pairs_computed_over_useful": plan.pairs / pack.attention_pairs}
        for kind, seconds, pairs in (
            ("tree_flex", tree, pack.attention_pairs),
            ("flat_flash", [sum(part) for part in zip(*flash, strict=True)], flat_pairs),
        ):
            work = 4.0 * HEADS * DIM * pairs
            figures[kind] = {
                "forward_ms": round(1e3 * seconds[0], 3),
                "backward_ms": round(1e3 * seconds[1], 3),
                "useful_tflops": round(work * (1 + BACKWARD) / sum(seconds) / 1e12, 1),
            }
        return {**figures, "time_ratio": sum(tree) / sum(sum(part) for part in flash)}

    return measure


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _speed(forward: Callable[[], Tensor], inputs: Tensors) -> list[float]:
    """Median seconds of a forward and of a backward pass."""
    output = forward()  # compiled here
    weights = torch.randn_like(output)
    torch.autograd.grad(output, inputs, weights)
    forwards, backwards = [], []
    for _ in range(REPEATS):
        forwards.append(timed(forward))
        output = forward()
        backwards.append(timed(partial(torch.autograd.grad, output, inputs, weights)))
    return [median(forwards), median(backwards)]
