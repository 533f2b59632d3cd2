"""Qwen3 4B learns to reason with python and search, on one GPU to one node.

    arpo train reasoning_4b+1gpu model.path=DIR data.path=train_10k.parquet

Model: Qwen/Qwen3-4B. Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1gpu": RecipeLayout(layers=33, token_budget=8192, memory_fraction=0.5, offload=True),
    "2gpus": RecipeLayout(tensor=2, layers=30, token_budget=8192, engine=2, memory_fraction=0.4),
    "4gpus": RecipeLayout(data=4, layers=34, token_budget=8192, engine=2, memory_fraction=0.4),
    "1node": RecipeLayout(data=8, layers=34, token_budget=8192, engine=4, memory_fraction=0.4),
    "a100": RecipeLayout(gpu="a100-80", data=8, layers=34, token_budget=8192, engine=4, memory_fraction=0.4),
}
FP8_LAYOUTS = {
    "1gpu": Fp8Layout(layers=33, memory_fraction=0.4),
    "2gpus": Fp8Layout(layers=30),
    "4gpus": Fp8Layout(layers=35),
    "1node": Fp8Layout(layers=34, memory_fraction=0.4),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "1node"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train with the 7B hyper-parameters (none are published for this size), on one node."""
    return LAYOUTS["1node"].apply(base("reasoning_4b", "Qwen/Qwen3-4B"))
