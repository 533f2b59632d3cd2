"""Qwen3 1.7B learns to reason with python and search, on one GPU to one node.

    arpo train reasoning_1700m+1gpu model.path=DIR data.path=train_10k.parquet

Model: Qwen/Qwen3-1.7B. Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import FP8, FP8_ENGINE, RecipeLayout, Variant, variants

LAYOUTS = {
    "1gpu": RecipeLayout(layers=23, token_budget=8192, memory_fraction=0.4),
    "2gpus": RecipeLayout(data=2, layers=21, token_budget=8192, memory_fraction=0.5),
    "4gpus": RecipeLayout(data=4, layers=20, token_budget=8192, engine=2, memory_fraction=0.6),
    "1node": RecipeLayout(data=8, layers=20, token_budget=8192, engine=4, memory_fraction=0.6),
    "l40s": RecipeLayout(gpu="l40s", layers=25, token_budget=8192, memory_fraction=0.6, offload=True),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS), **ARMS, "fp8": FP8, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train with the 7B hyper-parameters (none are published for this size), on one node."""
    return LAYOUTS["1node"].apply(base("reasoning_1700m", "Qwen/Qwen3-1.7B"))
