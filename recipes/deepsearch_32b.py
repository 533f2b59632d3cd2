"""Qwen3 32B learns deep search, with the hyper-parameters of the 14B run (none are published for this size).

    arpo train deepsearch_32b model.path=DIR data.path=hard_search_1k.parquet

Model: Qwen/Qwen3-32B. Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search_large as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=8, layers=49, token_budget=8192, engine=8, memory_fraction=0.5, offload=True),
    "2nodes": RecipeLayout(tensor=8, data=2, layers=49, token_budget=8192, engine=8, memory_fraction=0.5, offload=True),
    "4nodes": RecipeLayout(tensor=8, data=4, layers=54, token_budget=8192, engine=8, memory_fraction=0.4),
    "16nodes": RecipeLayout(tensor=8, data=8, context=2, layers=35, token_budget=8192, engine=8, memory_fraction=0.5),
    "h200": RecipeLayout(gpu="h200", tensor=4, data=4, layers=57, token_budget=8192, engine=8),
    "split": RecipeLayout(
        tensor=4,
        data=2,
        pipeline=2,
        layers=13,
        token_budget=8192,
        group_tokens=8192,
        engine=8,
        engines=2,
        memory_fraction=0.85,
        split=True,
    ),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=50, memory_fraction=0.4),
    "2nodes": Fp8Layout(layers=50, memory_fraction=0.4),
    "4nodes": Fp8Layout(layers=55),
    "16nodes": Fp8Layout(layers=36, memory_fraction=0.4),
    "split": Fp8Layout(layers=17, memory_fraction=0.85),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "4nodes"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train on 64 questions with 12 trajectories each per step, on four nodes."""
    return LAYOUTS["4nodes"].apply(base("deepsearch_32b", "Qwen/Qwen3-32B"))
