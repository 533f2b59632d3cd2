"""Time of a forward and backward pass of Megatron on trees, compared with their flattened trajectories.

Both sides use the same packs, attention and model. The flattened side has neither padding nor masked pairs
(variable-length causal attention). Work outside attention is proportional to tokens, so `captured`, which is (flat time
/ tree time) / (flat tokens / unique tokens), is 1 if all shared work is saved, and more if attention shrinks more.
`captured_of_work` is the share of the FLOP floor that is reached: it has FLOPs of tokens, pairs and head instead of
tokens, and is 1 if a FLOP takes the same time in both.

By default the model has one layer and packs are small, so that all families end within 5 minutes on two idle cores and
within 4 GB, while the ratio of attention to products is that of a deeper model. The activations of deep search are most
of the memory: packs of 2,048 tokens keep 17,841 tokens at once, packs of 3,072 keep 22,856, and packs of 1,024 22,024.

`pair_slowness` is the time of an attention FLOP over that of a FLOP of a matrix product, a parameter of the packer's
cost model. It is a least-squares fit to the medians of all passes, each weighted by its inverse.
"""

import sys
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench import memory
from arpo_megatron.config import JobConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import PAIR_SLOWNESS, CostModel
from arpo_megatron.packing.flops import forward_flops, update_flops
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees, rank_costs, report_packs
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import RolloutTree

SHAPE = replace(
    KNOWN_MODELS["Qwen/Qwen3-8B"],
    layers=2,
    hidden=768,
    heads=6,
    kv_heads=2,
    head_dim=64,
    ffn=2304,
    vocabulary=2048,
    max_positions=16384,
)
GOAL = 0.95
"""Share of the FLOP floor (`captured_of_work`) that is wanted for each mix."""
RANKS = 8
"""Data-parallel ranks of the reported balance, which is planned and not run."""
TREES = 32
"""Trees of the reported balance."""


@dataclass(frozen=True, slots=True)
class PackSizes:
    """The model of a measurement, and the token budget of its packs."""

    spec: ModelSpec
    """Sizes of the model."""
    token_budget: int
    """Tokens per pack."""

    def packed(self, trees: list[RolloutTree], *, share_prompt: bool = True) -> list[TreePack]:
        """Pack trees with the credit of supervised training."""
        return pack_trees(trees, supervised_credit(trees), token_budget=self.token_budget, share_prompt=share_prompt)


def bench_pack(
    config: JobConfig,
    *,
    mixes: list[str],
    seconds: float,
    layers: int = 1,
    token_budget: int = 2048,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure updates on one tree of each mix, on one rank in float32.

    The two sides are timed in turn, so that drift of the machine affects both.

    Args:
        config: seed and sampling temperature.
        mixes: names in `MIXES`; the figures of the first one are at the top level of the result.
        seconds: time for a mix; each side is timed at least once, after a pass over one pack as a warm-up.
        layers: number of layers of the model.
        token_budget: tokens per pack.
        progress: print each pass to standard error.
    """
    setting = PackSizes(replace(SHAPE, layers=layers), token_budget)
    config = replace(config, model=replace(config.model, dtype="float32"))
    parallel.initialize(config.parallel, config.seed)
    try:
        actor = Actor(config, setting.spec, None, optimizer=config.optimizer, total_updates=10**6)
        found = {name: _measure(actor, name, setting, seconds, progress) for name in mixes}
    finally:
        parallel.destroy()
    return {
        "mix": mixes[0],
        **found[mixes[0]],
        "pair_slowness": _pair_slowness(setting.spec, list(found.values())),
        "pair_slowness_assumed": PAIR_SLOWNESS,
        "goal": GOAL,
        "peak_memory_gb": round(memory.highest() / 1e9, 2),
        "mixes": found,
        "shape": f"{layers} x {SHAPE.hidden}",
        "token_budget": token_budget,
    }


def _pair_slowness(spec: ModelSpec, found: list[dict[str, Any]]) -> float:
    """Fit the time of an attention FLOP over that of another FLOP to the flat and the tree passes."""
    rows, seconds = [], []
    for figures in found:
        for kind in ("tree", "flat"):
            tokens, pairs, targets = (figures[f"{kind}_{what}"] for what in ("tokens", "pairs", "targets"))
            linear = sum(forward_flops(spec, tokens, 0, targets))
            rows.append([linear, forward_flops(spec, 0, pairs, 0)[0]])
            seconds.append(figures[f"{kind}_s"])
    weighted = np.array(rows) / np.array(seconds)[:, None]
    (linear_s, attention_s), _ = nnls(weighted, np.ones(len(seconds)))
    return float(attention_s / linear_s) if linear_s else float("inf")


def _measure(actor: Actor, name: str, setting: PackSizes, seconds: float, progress: bool) -> dict[str, Any]:
    mix = MIXES[name]
    trees = [mix.tree(0, SHAPE.vocabulary)]
    packs = {"flat": setting.packed(flattened(trees), share_prompt=False), "tree": setting.packed(trees)}
    times: dict[str, list[float]] = {kind: [] for kind in packs}
    gradients: dict[str, list[torch.Tensor]] = {}
    for own in packs.values():
        actor.accumulate([pack for pack in own if not pack.inherited][:1], None)
    started = time.perf_counter()
    while not times["tree"] or time.perf_counter() - started < seconds:
        for kind, own in packs.items():
            begun = time.perf_counter()
            actor.accumulate(own, None)
            times[kind].append(time.perf_counter() - begun)
            if progress:
                print(f"{name}: {kind} pass {len(times[kind])}: {times[kind][-1]:.2f} s", file=sys.stderr)
            if kind not in gradients:
                gradients[kind] = [p.main_grad.detach().clone() for p in actor.model.parameters()]
    tree_s, flat_s = (median(times[kind]) for kind in ("tree", "flat"))
    tokens = {kind: sum(len(pack) for pack in packs[kind]) for kind in packs}
    pairs = {kind: sum(pack.attention_pairs for pack in packs[kind]) for kind in packs}
    made = report_packs(packs["tree"], trees)
    work = {kind: update_flops(setting.spec, packs[kind]).model_update for kind in packs}
    return {
        "passes": len(times["tree"]),
        "tree_s": tree_s,
        "flat_s": flat_s,
        "tree_tokens": tokens["tree"],
        "flat_tokens": tokens["flat"],
        "tree_pairs": pairs["tree"],
        "flat_pairs": pairs["flat"],
        "tree_targets": sum(len(pack.predictors) for pack in packs["tree"]),
        "flat_targets": sum(len(pack.predictors) for pack in packs["flat"]),
        "token_ratio": tokens["tree"] / tokens["flat"],
        "pair_ratio": pairs["tree"] / pairs["flat"],
        "time_ratio": tree_s / flat_s,
        "captured": (flat_s / tree_s) / (tokens["flat"] / tokens["tree"]),
        "work_ratio": work["tree"] / work["flat"],
        "captured_of_work": (flat_s / tree_s) / (work["flat"] / work["tree"]),
        "repeated_share": made.repeated / made.computed,
        "repeated_share_in_a_pipeline": _repeated_share(trees, setting.token_budget),
        "live_tokens": made.live_tokens,
        "packs": made.packs,
        "grad_rel_error": _distance(gradients["tree"], gradients["flat"]),
        **_balance(name, setting),
    }


def _repeated_share(trees: list[RolloutTree], token_budget: int) -> float:
    """Return the share of repeated tokens if cuts repeat ancestors, at the smallest valid budget."""
    budget = max(token_budget, *(len(tree.path_tokens(leaf)) for tree in trees for leaf in tree.leaves()))
    packs = pack_trees(trees, supervised_credit(trees), token_budget=budget, inherit=False)
    made = report_packs(packs, trees)
    return made.repeated / made.computed


def _distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative L2 distance of a parameter's two gradients.

    The denominator is at least a thousandth of the largest gradient norm; smaller gradients are rounding.
    """
    norms = [float(b.double().norm()) for b in expected]
    least = 1e-3 * max(norms)
    return max(
        float((a.double() - b.double()).norm()) / max(norm, least)
        for a, b, norm in zip(found, expected, norms, strict=True)
    )


def _balance(name: str, setting: PackSizes) -> dict[str, float]:
    """Return the slowest rank over the mean and over a lower bound, and the packs over their lower bound, less 1.

    Trees of a mix share no prompts, so packs compute every token of the trees, at most one budget each.
    """
    trees = [MIXES[name].tree(seed, SHAPE.vocabulary) for seed in range(TREES)]
    cost = CostModel.of(setting.spec)
    packs = pack_trees(trees, supervised_credit(trees), token_budget=setting.token_budget, ranks=RANKS, cost=cost)
    ranks = rank_costs(packs, RANKS, cost)
    whole = pack_trees(trees, supervised_credit(trees), token_budget=10**9, ranks=TREES, cost=cost)  # a tree a rank
    largest = max(rank_costs(whole, TREES, cost))
    fewest = max(RANKS, -(-sum(tree.unique_tokens for tree in trees) // setting.token_budget))
    return {
        "imbalance": report_packs(packs, trees, ranks=RANKS, cost=cost).imbalance,
        "slowest_rank_over_lower_bound": max(ranks) / max(sum(ranks) / RANKS, largest) - 1,
        "packs_over_lower_bound": len(packs) / fewest - 1,
    }
