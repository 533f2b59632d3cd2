"""Qwen2.5 7B learns to reason with python and search: the paper's main reasoning run.

    arpo train reasoning_7b model.path=DIR data.path=train_10k.parquet

Model: Qwen/Qwen2.5-7B-Instruct, after its cold start (sft_7b). Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import FP8_ENGINE, Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=2, data=4, layers=24, token_budget=8192, engine=4, memory_fraction=0.4),
    "2nodes": RecipeLayout(tensor=2, data=8, layers=23, token_budget=8192, engine=4, memory_fraction=0.5),
    "4nodes": RecipeLayout(tensor=2, data=16, layers=22, token_budget=8192, engine=4, memory_fraction=0.5),
    "16nodes": RecipeLayout(
        tensor=4, data=16, context=2, recompute="none", token_budget=8192, engine=4, memory_fraction=0.6
    ),
    "h200": RecipeLayout(gpu="h200", data=8, layers=24, token_budget=8192, engine=4, memory_fraction=0.4),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=24),
    "2nodes": Fp8Layout(layers=23, memory_fraction=0.4),
    "4nodes": Fp8Layout(layers=22, memory_fraction=0.4),
    "16nodes": Fp8Layout(recompute="none", memory_fraction=0.6),
    "h200": Fp8Layout(layers=24, memory_fraction=0.4),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS, FP8_LAYOUTS, "1node"), **ARMS, "fp8_engine": FP8_ENGINE}


def recipe() -> JobConfig:
    """Train with 16 trajectories per question, 8 of them from the prompt, on one node."""
    return LAYOUTS["1node"].apply(base("reasoning_7b", "Qwen/Qwen2.5-7B-Instruct"))
