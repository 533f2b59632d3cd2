"""Qwen3 14B learns deep search: the paper's largest run.

    arpo train deepsearch_14b model.path=DIR data.path=hard_search_1k.parquet

Model: Qwen/Qwen3-14B, after its cold start (sft_qwen3_14b). Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search_large as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=4, data=2, layers=36, token_budget=8192, engine=8),
    "2nodes": RecipeLayout(tensor=4, data=4, layers=33, token_budget=8192, engine=8, memory_fraction=0.4),
    "4nodes": RecipeLayout(tensor=4, data=8, layers=31, token_budget=8192, engine=8, memory_fraction=0.5),
    "16nodes": RecipeLayout(
        tensor=8, data=8, context=2, recompute="none", token_budget=8192, engine=8, memory_fraction=0.6
    ),
    "h200": RecipeLayout(gpu="h200", tensor=2, data=4, layers=35, token_budget=8192, engine=8, memory_fraction=0.4),
    "split": RecipeLayout(
        tensor=4, data=4, layers=32, token_budget=8192, engine=8, engines=2, memory_fraction=0.85, split=True
    ),
}
FP8_LAYOUTS = {
    "2nodes": Fp8Layout(layers=33),
    "4nodes": Fp8Layout(layers=32, memory_fraction=0.4),
    "16nodes": Fp8Layout(recompute="none", memory_fraction=0.6),
    "h200": Fp8Layout(layers=36),
    "split": Fp8Layout(layers=33, memory_fraction=0.85),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "2nodes"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train on 64 questions with 12 trajectories each per step, on two nodes."""
    return LAYOUTS["2nodes"].apply(base("deepsearch_14b", "Qwen/Qwen3-14B"))
