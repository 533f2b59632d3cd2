"""Qwen3 8B learns deep search: six tool calls and 10,000 tokens per trajectory.

    arpo train deepsearch_8b model.path=DIR data.path=hard_search_1k.parquet

Model: Qwen/Qwen3-8B, after its cold start (sft_qwen3_8b). Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=2, data=4, token_budget=8192, engine=4, memory_fraction=0.4),
    "2nodes": RecipeLayout(tensor=2, data=8, layers=35, token_budget=8192, engine=8, memory_fraction=0.4),
    "4nodes": RecipeLayout(tensor=2, data=16, layers=35, token_budget=8192, engine=8, memory_fraction=0.5),
    "16nodes": RecipeLayout(tensor=8, data=16, layers=18, token_budget=8192, engine=8, memory_fraction=0.7),
    "h200": RecipeLayout(gpu="h200", data=8, token_budget=8192, engine=4, memory_fraction=0.4),
    "split": RecipeLayout(
        tensor=2, data=8, layers=35, token_budget=8192, engine=8, engines=2, memory_fraction=0.85, split=True
    ),
}
FP8_LAYOUTS = {
    "2nodes": Fp8Layout(memory_fraction=0.4),
    "4nodes": Fp8Layout(memory_fraction=0.4),
    "16nodes": Fp8Layout(layers=15, memory_fraction=0.7),
    "split": Fp8Layout(memory_fraction=0.85),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "1node"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train on 128 questions with 16 trajectories each per step, on one node."""
    return LAYOUTS["1node"].apply(base("deepsearch_8b", "Qwen/Qwen3-8B"))
