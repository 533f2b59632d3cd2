"""Speed of a training step: trees and flat sequences, bfloat16 and FP8, in tokens/s and as a share of the peak.

The peak is that of a large bfloat16 matrix product in the same process. `packing/flops.py` counts the model's FLOPs.
"""

import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.bench.gpu.measure import Figures, Measurements, packed, peak_gib, reset_peak, timed
from arpo_megatron.config import Fp8Recipe, JobConfig, ModelConfig, ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import check_machine
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import update_flops
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import report_packs
from arpo_megatron.plan.activations import Tokens
from arpo_megatron.plan.memory import process_parts, update_parts
from arpo_megatron.plan.recompute import describe, recomputations
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import Role, RolloutTree

QWEN3_4B = KNOWN_MODELS["Qwen/Qwen3-4B"]
PEAK_SIZE = 8192

Sides = dict[str, list[RolloutTree]]
"""The trees of a measurement by name: of one sequence, or of a tree and its flattened trajectories."""


def _gpu_memory() -> float:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else math.inf


@dataclass(slots=True)
class UpdateBench:
    """A random model with its optimizer; one at a time is in memory."""

    spec: ModelSpec = QWEN3_4B
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    repeats: int = 2
    """Timed updates, after one that compiles."""
    memory: float = field(default_factory=_gpu_memory)
    """Bytes of the GPU's memory."""
    _key: tuple[Fp8Recipe, ParallelConfig] | None = None
    _actor: Actor | None = None
    _peak_flops: float = field(default=0.0)

    def config(self, recipe: Fp8Recipe, layout: ParallelConfig) -> JobConfig:
        """Return the config of a job that trains this way.

        Raises:
            UserError: the FP8 recipe does not support the sizes of the model's products.
        """
        spec = self.spec
        model = ModelConfig(
            dtype=self.dtype,
            fp8=recipe,
            hidden_size=spec.heads * spec.head_dim,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            ffn_size=spec.ffn,
            layers=spec.layers,
        )
        spec.check_fp8(model, layout)
        return JobConfig(name="gpu-update", model=model, parallel=layout)

    def actor(self, recipe: Fp8Recipe, layout: ParallelConfig) -> Actor:
        """Return the model with its optimizer, and free the previous one if it was another."""
        if self._key != (recipe, layout) or self._actor is None:
            self._actor = None
            gc.collect()
            reset_peak()
            config = self.config(recipe, layout)
            if not torch.distributed.is_initialized():
                parallel.initialize(config.parallel, config.seed)
            self._actor = Actor(config, self.spec, None, optimizer=config.optimizer, total_updates=10**6)
            self._key = (recipe, layout)
        return self._actor

    def peak_flops(self) -> float:
        """Return the FLOP/s of a bfloat16 product of random values."""
        if not self._peak_flops:
            size = PEAK_SIZE if torch.cuda.is_available() else 256
            left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=parallel.device()) for _ in range(2))

            def products() -> None:
                for _ in range(10):
                    left @ right

            products()
            self._peak_flops = 10 * 2 * size**3 / median(timed(products) for _ in range(3))
        return self._peak_flops

    def layout(self, recipe: Fp8Recipe, sides: Sides, budget: int) -> ParallelConfig:
        """Return one rank with the cheapest recomputation with which every side fits, by the planner's estimate.

        Raises:
            UserError: a side does not fit with full recomputation, or this machine cannot run the recipe.
        """
        check_machine(self.config(recipe, ParallelConfig()))
        each = [(trees, packed(trees, budget)) for trees in sides.values()]

        def needed(layout: ParallelConfig) -> float:
            return max(self._bytes(self.config(recipe, layout), trees, packs) for trees, packs in each)

        for layout in recomputations(ParallelConfig(), self.spec, lambda layout: needed(layout) <= self.memory):
            return layout
        raise UserError(
            f"needs {needed(ParallelConfig(recompute='full')) / 2**30:.1f} GiB with full recomputation, the GPU has "
            f"{self.memory / 2**30:.1f} GiB"
        )

    def _bytes(self, config: JobConfig, trees: list[RolloutTree], packs: list[TreePack]) -> float:
        tokens = Tokens(max(map(len, packs)), max(len(pack.token_ids) for pack in packs))
        targets, live = max(len(pack.predictors) for pack in packs), report_packs(packs, trees).live_tokens
        parts = update_parts(config, self.spec, tokens, targets, live=live) | process_parts(self.memory)
        return sum(parts.values())

    def measure(self, recipe: Fp8Recipe, layout: ParallelConfig, sides: Sides, budget: int) -> Figures:
        """Measure updates on each side in turn; on a tree and its flattened trajectories also their ratios."""
        packs = {side: packed(trees, budget) for side, trees in sides.items()}
        figures = self._measure(recipe, layout, packs)
        return figures | _gain(figures, packs, self.spec) if "tree" in packs else figures

    def _measure(self, recipe: Fp8Recipe, layout: ParallelConfig, sides: dict[str, list[TreePack]]) -> Figures:
        actor = self.actor(recipe, layout)
        figures: dict[str, Any] = {"recompute": describe(layout), "peak_tflops": round(self.peak_flops() / 1e12, 1)}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(1 + self.repeats):
            for side, packs in sides.items():
                if not repeat:
                    reset_peak()
                seconds[side].append(timed(partial(actor.update, packs, None)))
                if not repeat:
                    figures[side] = {"gib": peak_gib()}
        for side, packs in sides.items():
            elapsed, tokens = median(seconds[side][1:]), sum(len(pack) for pack in packs)
            flops = update_flops(self.spec, packs).model_update
            figures[side] |= {
                "step_s": round(elapsed, 4),
                "first_s": round(seconds[side][0], 2),
                "tokens": tokens,
                "packs": len(packs),
                "tokens_per_s": round(tokens / elapsed),
                "tflops": round(flops / elapsed / 1e12, 2),
                "mfu": round(flops / elapsed / self.peak_flops(), 4),
            }
        return figures


MEASURED: dict[str, tuple[Fp8Recipe, str, int]] = {
    "bfloat16 flat 8192": ("none", "flat", 8192),
    "bfloat16 reasoning": ("none", "reasoning", 8192),
    "bfloat16 long_prompt": ("none", "long_prompt", 8192),
    "bfloat16 tau2_like": ("none", "tau2_like", 16384),
    "blockwise flat 8192": ("blockwise", "flat", 8192),
    "blockwise reasoning": ("blockwise", "reasoning", 8192),
    "current flat 8192": ("current", "flat", 8192),
    "bfloat16 flat 16384": ("none", "flat", 16384),
    "blockwise flat 16384": ("blockwise", "flat", 16384),
    "bfloat16 deep_search": ("none", "deep_search", 8192),
}
"""FP8 recipe, family of trees (`flat`: one sequence) and tokens of a pack, the most important ones first."""


def update_measurements(bench: UpdateBench) -> Measurements:
    """Return the measurements that fit this machine; name the others, with the reason, on standard error.

    Raises:
        UserError: none fits.
    """
    found: dict[str, Callable[[], Figures]] = {}
    reasons = []
    for name, (recipe, mix, budget) in MEASURED.items():
        sides = trees_of(mix, bench.spec.vocabulary, budget)
        try:
            layout = bench.layout(recipe, sides, budget)
        except UserError as error:
            reasons.append(f"{name}: not measured: {error}")
            print(reasons[-1], file=sys.stderr, flush=True)
            continue
        found[name] = partial(bench.measure, recipe, layout, sides, budget)
    if not found:
        raise UserError(reasons[0])
    return found


def trees_of(mix: str, vocabulary: int, budget: int) -> Sides:
    """Return a tree of the mix and its flattened trajectories, or for `flat` one sequence of `budget` tokens."""
    if mix == "flat":
        return {"flat": [_sequence(budget)]}
    tree = MIXES[mix].tree(0, vocabulary)
    return {"tree": [tree], "flat": flattened([tree])}


def _sequence(length: int) -> RolloutTree:
    rng = np.random.default_rng(length)
    tree = RolloutTree("flat", rng.integers(0, 1024, 16))
    tree.add(0, Role.MODEL, rng.integers(0, 1024, length - 16))
    return tree


def _gain(figures: Figures, sides: dict[str, list[TreePack]], spec: ModelSpec) -> Figures:
    """Return the time of trees over that of their flattened trajectories, and the same ratio of the FLOPs."""
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
