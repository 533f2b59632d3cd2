"""Speed of a training step: trees and flat sequences, bfloat16 and FP8, in tokens/s and as a share of the peak.

The peak is that of a large bfloat16 matrix product in the same process. `packing/flops.py` counts the model's FLOPs.
"""

import gc
import math
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.gpu.measure import Figures, Measurements, peak_gib, reset_peak, timed
from arpo_megatron.config import Fp8Recipe, JobConfig, ModelConfig, ParallelConfig, Recompute
from arpo_megatron.errors import UserError
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.flops import update_flops
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.activations import Tokens
from arpo_megatron.plan.memory import pack_parts, static_parts
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import Role, RolloutTree

QWEN3_4B = KNOWN_MODELS["Qwen/Qwen3-4B"]
PEAK_SIZE = 8192


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
    """Bytes of the GPU that a process can allocate."""
    _key: tuple[str, str] | None = None
    _actor: Actor | None = None
    _peak_flops: float = field(default=0.0)

    def config(self, recipe: Fp8Recipe, recompute: Recompute) -> JobConfig:
        """Return the config of a job that trains this way.

        Raises:
            UserError: the FP8 recipe does not support the sizes of the model's products.
        """
        spec, layout = self.spec, ParallelConfig(recompute=recompute)
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

    def actor(self, recipe: Fp8Recipe, recompute: Recompute) -> Actor:
        """Return the model with its optimizer, and free the previous one if it was another."""
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

    def measure_flat(self, length: int, recipe: Fp8Recipe) -> Figures:
        """Measure updates on one sequence of `length` tokens, with full recomputation if it would not fit without."""
        return self._measure(recipe, self.recompute(recipe, length), {"flat": _packed([_sequence(length)], length)})

    def recompute(self, recipe: Fp8Recipe, tokens: int) -> Recompute:
        """Return the recomputation with which a pack of `tokens` tokens fits the GPU, by the planner's estimate.

        Raises:
            UserError: it does not fit with full recomputation.
        """
        choices: tuple[Recompute, ...] = ("none", "full")
        for choice in choices:
            if (needed := self._bytes(recipe, choice, tokens)) <= self.memory:
                return choice
        raise UserError(
            f"{tokens} tokens need {needed / 2**30:.0f} GiB with full recomputation, the GPU has "
            f"{self.memory / 2**30:.0f} GiB"
        )

    def _bytes(self, recipe: Fp8Recipe, recompute: Recompute, tokens: int) -> float:
        config = self.config(recipe, recompute)
        parts = static_parts(config, self.spec, 0) | pack_parts(config, self.spec, Tokens(tokens, tokens), tokens)
        return sum(parts.values())

    def measure_mix(self, mix: str, recipe: Fp8Recipe, budget: int, recompute: Recompute = "none") -> Figures:
        """Measure updates on a tree of the mix and on its flattened trajectories, in turn."""
        trees = [MIXES[mix].tree(0, self.spec.vocabulary)]
        sides = {"tree": _packed(trees, budget), "flat": _packed(flattened(trees), budget)}
        figures = self._measure(recipe, recompute, sides)
        return figures | _gain(figures, sides, self.spec)

    def _measure(self, recipe: Fp8Recipe, recompute: Recompute, sides: dict[str, list[TreePack]]) -> Figures:
        actor = self.actor(recipe, recompute)
        figures: dict[str, Any] = {"recompute": recompute, "peak_tflops": round(self.peak_flops() / 1e12, 1)}
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


def update_measurements(bench: UpdateBench) -> Measurements:
    """Return the measurements, the most important ones first."""
    return {
        "bfloat16 flat 8192": partial(bench.measure_flat, 8192, "none"),
        "bfloat16 reasoning": partial(bench.measure_mix, "reasoning", "none", 8192),
        "bfloat16 long_prompt": partial(bench.measure_mix, "long_prompt", "none", 8192),
        "bfloat16 tau2_like": partial(bench.measure_mix, "tau2_like", "none", 16384),
        "blockwise flat 8192": partial(bench.measure_flat, 8192, "blockwise"),
        "blockwise reasoning": partial(bench.measure_mix, "reasoning", "blockwise", 8192),
        "current flat 8192": partial(bench.measure_flat, 8192, "current"),
        "bfloat16 flat 16384": partial(bench.measure_flat, 16384, "none"),
        "blockwise flat 16384": partial(bench.measure_flat, 16384, "blockwise"),
        "bfloat16 deep_search, full recomputation": partial(bench.measure_mix, "deep_search", "none", 8192, "full"),
    }


def _sequence(length: int) -> RolloutTree:
    rng = np.random.default_rng(length)
    tree = RolloutTree("flat", rng.integers(0, 1024, 16))
    tree.add(0, Role.MODEL, rng.integers(0, 1024, length - 16))
    return tree


def _packed(trees: list[RolloutTree], budget: int) -> list[TreePack]:
    return pack_trees(trees, supervised_credit(trees), token_budget=budget, share_prompt=False)


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
