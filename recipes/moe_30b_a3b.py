"""Qwen3 30B-A3B, 8 of 128 experts per token, learns deep search with the hyper-parameters of the 14B run.

    arpo train moe_30b_a3b model.path=DIR data.path=hard_search_1k.parquet

In training each token goes to the experts that the engine chose for it (arXiv 2510.11370).
Model: Qwen/Qwen3-30B-A3B. Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from dataclasses import replace

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search_large as base
from arpo_megatron.recipes._layouts import Fp8Layout, RecipeLayout, Variant, fp8_engine_variants, variants

LAYOUTS = {
    "1node": RecipeLayout(data=8, expert=8, layers=47, token_budget=8192, engine=4, memory_fraction=0.4, offload=True),
    "2nodes": RecipeLayout(data=8, pipeline=2, expert=8, layers=15, token_budget=8192, group_tokens=8192, engine=4),
    "4nodes": RecipeLayout(
        tensor=4,
        data=8,
        expert=8,
        recompute=("layernorm", "moe_act"),
        token_budget=8192,
        group_tokens=16384,
        engine=8,
        memory_fraction=0.4,
    ),
    "16nodes": RecipeLayout(
        tensor=4,
        data=8,
        pipeline=4,
        recompute="none",
        token_budget=8192,
        group_tokens=8192,
        engine=8,
        memory_fraction=0.6,
    ),
    "h200": RecipeLayout(gpu="h200", tensor=4, data=4, layers=26, token_budget=8192, engine=4, memory_fraction=0.4),
    "split": RecipeLayout(tensor=4, data=4, token_budget=8192, engine=4, engines=4, memory_fraction=0.85, split=True),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=47),
    "2nodes": Fp8Layout(layers=14),
    "4nodes": Fp8Layout(layers=5),
}
VARIANTS: dict[str, Variant] = {
    **variants(LAYOUTS, FP8_LAYOUTS, "4nodes"),
    **ARMS,
    **fp8_engine_variants(LAYOUTS, "4nodes", kv_heads=4, whole_experts=True),
}


def recipe() -> JobConfig:
    """Train on 64 questions with 12 trajectories each per step, on four nodes."""
    job = base("moe_30b_a3b", "Qwen/Qwen3-30B-A3B")
    return LAYOUTS["4nodes"].apply(replace(job, algorithm=replace(job.algorithm, router_replay="rollout")))
