"""Qwen3 14B learns deep search: the paper's largest run.

    arpo train deepsearch_14b model.path=DIR data.path=hard_search_1k.parquet

Model: Qwen/Qwen3-14B. Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search_large as base
from arpo_megatron.recipes._layouts import FP8, RecipeLayout, Variant, asynchronous, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=8, data=1, engine=4, memory_fraction=0.35),
    "2nodes": RecipeLayout(tensor=4, data=4, engine=4, memory_fraction=0.35),
    "4nodes": RecipeLayout(tensor=4, data=8, engine=4, memory_fraction=0.4),
    "16nodes": RecipeLayout(tensor=8, data=8, pipeline=2, engine=8, memory_fraction=0.5),
    "h200": RecipeLayout(tensor=4, data=2, engine=4, memory_fraction=0.5),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS), "split": asynchronous(LAYOUTS["2nodes"]), **ARMS, "fp8": FP8}


def recipe() -> JobConfig:
    """Train on 64 questions with 12 trajectories each per step, on two nodes."""
    return LAYOUTS["2nodes"].apply(base("deepsearch_14b", "Qwen/Qwen3-14B"))
