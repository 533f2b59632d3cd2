"""Speed of a training step: trees and flat sequences, bfloat16 and FP8, as tokens/s and share of the measured peak.

The peak is that of a large bfloat16 matrix product in the same process. Model FLOPs are those of packing/flops.py.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.gpu.journal import Figures, Part, peak_gib, reset_peak, timed
from arpo_megatron.bench.gpu.kernels import speed_parts
from arpo_megatron.config import Fp8Recipe, JobConfig, ModelConfig, ParallelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import Recompute, update_flops
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import Role, RolloutTree

QWEN3_4B = KNOWN_MODELS["Qwen/Qwen3-4B"]
PEAK_SIZE = 8192


@dataclass(slots=True)
class Bench:
    """The model under measurement; one at a time is in memory.

    Attributes:
        spec: of the model, with random weights.
        dtype: of its parameters.
        repeats: timed updates of each kind, after one that is not.
    """

    spec: ModelSpec = QWEN3_4B
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    repeats: int = 2
    _key: tuple[str, str] | None = None
    _actor: Actor | None = None
    _peak_flops: float = field(default=0.0)

    def config(self, recipe: Fp8Recipe, recompute: Recompute) -> JobConfig:
        """Of a job that trains so.

        Raises:
            UserError: the shape's products are not of the sizes that the recipe needs.
        """
        spec, layout = self.spec, ParallelConfig(recompute=recompute)
        width = spec.heads * spec.head_dim
        model = ModelConfig(
            dtype=self.dtype,
            fp8=recipe,
            hidden_size=width,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            ffn_size=spec.ffn,
            layers=spec.layers,
        )
        spec.check_fp8(model, layout)
        return JobConfig(name="gpu-update", model=model, parallel=layout)

    def actor(self, recipe: Fp8Recipe, recompute: Recompute) -> Actor:
        """The model with its optimizer."""
        if self._key != (recipe, recompute) or self._actor is None:
            self._actor = None
            gc.collect()
            reset_peak()
            config = self.config(recipe, recompute)
            if not torch.distributed.is_initialized():
                parallel.initialize(config.parallel, config.seed)
            self._actor = Actor(config, self.spec, None, optimizer=config.optimizer, total_updates=10**6)
            self._key = (recipe, recompute)
        return self._actor

    def peak_flops(self) -> float:
        """FLOP/s of a bfloat16 product on random values."""
        if not self._peak_flops:
            size = PEAK_SIZE if torch.cuda.is_available() else 256
            left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=parallel.device()) for _ in range(2))

            def products() -> None:
                for _ in range(10):
                    left @ right

            products()
            self._peak_flops = 10 * 2 * size**3 / median(timed(products) for _ in range(3))
        return self._peak_flops


def update_parts(bench: Bench) -> list[Part]:
    """In order of value."""

    def single(length: int, recipe: Fp8Recipe) -> Part:
        return Part(
            f"{recipe} flat {length}", partial(_prepare, bench, recipe, "none", length, [single_chain(length)], None)
        )

    def mix(name: str, recipe: Fp8Recipe, budget: int, recompute: Recompute = "none") -> Part:
        trees = [MIXES[name].tree(0, bench.spec.vocabulary)]
        part = f"{recipe} {name} {budget}{'' if recompute == 'none' else f' recompute {recompute}'}"
        return Part(part, partial(_prepare, bench, recipe, recompute, budget, trees, flattened(trees)))

    return [
        single(8192, "none"),
        mix("reasoning", "none", 8192),
        mix("long_prompt", "none", 8192),
        mix("tau2_like", "none", 16384),
        single(8192, "blockwise"),
        mix("reasoning", "blockwise", 8192),
        single(8192, "current"),
        single(8192, "delayed"),
        *speed_parts(),
        single(16384, "none"),
        single(16384, "blockwise"),
        mix("deep_search", "none", 8192, "full"),
    ]


def single_chain(length: int) -> RolloutTree:
    """One sequence."""
    rng = np.random.default_rng(length)
    tree = RolloutTree("flat", rng.integers(0, 1024, 16))
    tree.add(0, Role.MODEL, rng.integers(0, 1024, length - 16))
    return tree


def _prepare(
    bench: Bench,
    recipe: Fp8Recipe,
    recompute: Recompute,
    budget: int,
    trees: list[RolloutTree],
    flat: list[RolloutTree] | None,
) -> Callable[[], Figures]:
    bench.config(recipe, recompute)
    sides = {"tree" if flat else "flat": packed(trees, budget)} | ({"flat": packed(flat, budget)} if flat else {})
    for packs in sides.values():
        for pack in packs:
            flex_plan(pack.subtree_end, np.arange(pack.inherited, len(pack.subtree_end)))
    return partial(_measure, bench, recipe, recompute, sides)


def packed(trees: list[RolloutTree], budget: int) -> list[TreePack]:
    """Trees in packs for an update."""
    return pack_trees(trees, supervised_credit(trees), token_budget=budget, share_prompt=False)


def _measure(bench: Bench, recipe: Fp8Recipe, recompute: Recompute, sides: dict[str, list[TreePack]]) -> Figures:
    actor = bench.actor(recipe, recompute)
    figures: dict[str, Any] = {"peak_tflops": round(bench.peak_flops() / 1e12, 1)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(1 + bench.repeats):
        for side, packs in sides.items():
            if not repeat:
                reset_peak()
            seconds[side].append(timed(partial(actor.update, packs, None)))
            if not repeat:
                figures[side] = {"gib": peak_gib()}
    for side, packs in sides.items():
        elapsed, tokens = median(seconds[side][1:]), sum(len(pack) for pack in packs)
        flops = update_flops(bench.spec, packs).model_update
        figures[side] |= {
            "step_s": round(elapsed, 4),
            "first_s": round(seconds[side][0], 2),
            "tokens": tokens,
            "packs": len(packs),
            "tokens_per_s": round(tokens / elapsed),
            "tflops": round(flops / elapsed / 1e12, 2),
            "mfu": round(flops / elapsed / bench.peak_flops(), 4),
        }
    return figures | _gain(figures, sides, bench.spec)


def _gain(figures: Figures, sides: dict[str, list[TreePack]], spec: ModelSpec) -> Figures:
    """Trees against their flattened trajectories, and the floor: the ratio of what both have to compute."""
    if len(sides) == 1:
        return {}
    tree, flat = figures["tree"], figures["flat"]
    work = {side: update_flops(spec, packs).model_update for side, packs in sides.items()}
    pairs = {side: sum(pack.attention_pairs for pack in packs) for side, packs in sides.items()}
    ratio = tree["step_s"] / flat["step_s"]
    return {
        "time_ratio": round(ratio, 4),
        "token_ratio": round(tree["tokens"] / flat["tokens"], 4),
        "pair_ratio": round(pairs["tree"] / pairs["flat"], 4),
        "work_ratio": round(work["tree"] / work["flat"], 4),
        "captured": round(tree["tokens"] / flat["tokens"] / ratio, 4),
        "over_floor": round(ratio / (work["tree"] / work["flat"]) - 1, 4),
    }
