"""What training the tree saves: one Megatron update on trees against the same trajectories flattened.

The floor is the token ratio: work outside attention is proportional to tokens, and attention shrinks less. `captured`
is (flat time / tree time) / (flat tokens / unique tokens): 1 when all of the shared work is saved.
"""

import sys
import time
from statistics import median
from typing import Any

import numpy as np

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.attention import plan_attention
from arpo_megatron.actor.packing import TreePack, pack_trees
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.weights.shape import ModelShape

VOCABULARY = 120
TOKEN_BUDGET = 8192
TASKS, SAMPLES, INITIAL, CALLS = 8, 16, 8, 3
PROMPT, SEGMENT, RESULT = 200, (30, 70), (15, 35)
WARM_UP = 2


def bench_update(config: JobConfig, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` updates with the made model of `config` (its shape and dtype), on one rank.

    The two kinds are timed in turn, so a machine whose speed drifts slows both.
    """
    parallel.initialize(config.parallel, config.seed)
    try:
        actor = Actor(config, _shape(config), None, optimizer=config.optimizer, total_updates=10**6)
        trees = [_grown_task(seed) for seed in range(TASKS)]
        packs = {"tree": _packed(trees), "flat": _packed([flat for tree in trees for flat in _flattened(tree)])}
        seconds: dict[str, list[float]] = {"tree": [], "flat": []}
        for repeat in range(WARM_UP + repeats):
            for kind, times in seconds.items():
                started = time.perf_counter()
                actor.update(packs[kind], None, loss="ppo")
                times.append(time.perf_counter() - started)
                print(f"{kind} update {repeat + 1}/{WARM_UP + repeats}: {times[-1]:.2f} s", file=sys.stderr)
    finally:
        parallel.destroy()
    tree_s, flat_s = (median(seconds[kind][WARM_UP:]) for kind in ("tree", "flat"))
    tokens = {kind: sum(len(pack) for pack in packs[kind]) for kind in packs}
    pairs = {kind: sum(plan_attention(pack.subtree_end).pairs for pack in packs[kind]) for kind in packs}
    return {
        "tree_s": tree_s,
        "flat_s": flat_s,
        "unique_tokens": tokens["tree"],
        "flat_tokens": tokens["flat"],
        "token_ratio": tokens["tree"] / tokens["flat"],
        "pair_ratio": pairs["tree"] / pairs["flat"],
        "time_ratio": tree_s / flat_s,
        "captured": (flat_s / tree_s) / (tokens["flat"] / tokens["tree"]),
    }


def _packed(trees: list[RolloutTree]) -> list[TreePack]:
    return pack_trees(trees, supervised_credit(trees), token_budget=TOKEN_BUDGET)


def _shape(config: JobConfig) -> ModelShape:
    model = config.model
    return ModelShape(
        family="qwen3",
        layers=model.layers,
        hidden=model.hidden_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        ffn=model.ffn_size,
        vocabulary=VOCABULARY,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=False,
        qkv_bias=False,
        qk_norm=True,
        max_positions=2048,
    )


def _grown_task(seed: int) -> RolloutTree:
    """N trajectories of three calls from the prompt, and M - N forks behind random tool results."""
    rng = np.random.default_rng(seed)
    tree = RolloutTree(str(seed), rng.integers(0, VOCABULARY, PROMPT))
    forks: list[int] = []
    for _ in range(INITIAL):
        forks += _continue(tree, 0, CALLS, rng)
    for fork in rng.choice(forks, SAMPLES - INITIAL, replace=False):
        made = sum(tree.segments[index].role is Role.TOOL for index in tree.path(int(fork)))
        _continue(tree, int(fork), CALLS - made, rng)
    return tree


def _continue(tree: RolloutTree, parent: int, calls: int, rng: np.random.Generator) -> list[int]:
    """Calls with results and an answer below `parent`; returns the TOOL segments."""
    results = []
    for _ in range(calls):
        call = tree.add(parent, Role.MODEL, rng.integers(0, VOCABULARY, rng.integers(*SEGMENT)))
        parent = tree.add(call, Role.TOOL, rng.integers(0, VOCABULARY, rng.integers(*RESULT)))
        results.append(parent)
    tree.add(parent, Role.MODEL, rng.integers(0, VOCABULARY, rng.integers(*SEGMENT)))
    return results


def _flattened(tree: RolloutTree) -> list[RolloutTree]:
    """Every trajectory as a tree of its own."""
    flat = []
    for leaf in tree.leaves():
        single = RolloutTree(tree.task_id, tree.prompt_ids)
        for parent, index in enumerate(tree.path(leaf)[1:]):
            single.add(parent, tree.segments[index].role, tree.segments[index].token_ids)
        flat.append(single)
    return flat
