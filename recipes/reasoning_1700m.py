"""Qwen3 1.7B learns to reason with python and search, on one GPU to one node.

    arpo train reasoning_1700m+1gpu model.path=DIR data.path=train_10k.parquet

Model: Qwen/Qwen3-1.7B. Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1gpu": RecipeLayout(layers=23, token_budget=8192, memory_fraction=0.4),
    "2gpus": RecipeLayout(data=2, layers=21, token_budget=8192, memory_fraction=0.5),
    "4gpus": RecipeLayout(data=4, layers=20, token_budget=8192, engine=2, memory_fraction=0.6),
    "1node": RecipeLayout(data=8, layers=20, token_budget=8192, engine=4, memory_fraction=0.6),
    "l40s": RecipeLayout(gpu="l40s", layers=25, token_budget=8192, memory_fraction=0.6, offload=True),
}
FP8_LAYOUTS = {
    "1gpu": Fp8Layout(layers=23, memory_fraction=0.4),
    "2gpus": Fp8Layout(layers=21, memory_fraction=0.5),
    "4gpus": Fp8Layout(layers=20, memory_fraction=0.6),
    "1node": Fp8Layout(layers=19, memory_fraction=0.6),
    "l40s": Fp8Layout(layers=25, memory_fraction=0.5),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "1node"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train with the 7B hyper-parameters (none are published for this size), on one node."""
    return LAYOUTS["1node"].apply(base("reasoning_1700m", "Qwen/Qwen3-1.7B"))
