"""Llama 3.1 8B learns to reason with python and search.

    arpo train reasoning_8b model.path=DIR data.path=train_10k.parquet

Model: meta-llama/Llama-3.1-8B-Instruct, after its cold start (sft_8b). Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=2, data=4, layers=28, token_budget=8192, engine=4, memory_fraction=0.4),
    "2nodes": RecipeLayout(tensor=2, data=8, layers=27, token_budget=8192, engine=8, memory_fraction=0.4),
    "4nodes": RecipeLayout(tensor=2, data=16, layers=26, token_budget=8192, engine=8, memory_fraction=0.5),
    "16nodes": RecipeLayout(tensor=8, data=16, recompute="none", token_budget=8192, engine=8, memory_fraction=0.7),
    "h200": RecipeLayout(gpu="h200", data=8, layers=28, token_budget=8192, engine=4, memory_fraction=0.4),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=29),
    "2nodes": Fp8Layout(layers=27, memory_fraction=0.4),
    "4nodes": Fp8Layout(layers=27, memory_fraction=0.4),
    "16nodes": Fp8Layout(recompute="none", memory_fraction=0.7),
    "h200": Fp8Layout(layers=29),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "1node"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train with the 7B hyper-parameters, as in table 1 of the paper."""
    return LAYOUTS["1node"].apply(base("reasoning_8b", "meta-llama/Llama-3.1-8B-Instruct"))
