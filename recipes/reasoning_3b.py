"""Qwen2.5 3B learns to reason with python and search.

    arpo train reasoning_3b model.path=DIR data.path=train_10k.parquet

Model: Qwen/Qwen2.5-3B-Instruct, after its cold start (sft_3b). Data: dongguanting/ARPO-RL-Reasoning-10K.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import reasoning as base
from arpo_megatron.recipes._layouts import Fp8Layout, RecipeLayout, Variant, fp8_engine_variants, variants

LAYOUTS = {
    "1gpu": RecipeLayout(layers=30, token_budget=8192, memory_fraction=0.6, offload=True),
    "2gpus": RecipeLayout(data=2, layers=33, token_budget=8192, memory_fraction=0.4),
    "4gpus": RecipeLayout(data=4, layers=32, token_budget=8192, engine=2, memory_fraction=0.5),
    "1node": RecipeLayout(data=8, layers=31, token_budget=8192, engine=2, memory_fraction=0.5),
    "2nodes": RecipeLayout(data=16, layers=31, token_budget=8192, engine=2, memory_fraction=0.5),
    "4nodes": RecipeLayout(tensor=2, data=16, layers=20, token_budget=8192, engine=4, memory_fraction=0.7),
    "16nodes": RecipeLayout(
        tensor=2,
        data=16,
        pipeline=4,
        recompute="none",
        token_budget=8192,
        group_tokens=8192,
        engine=8,
        memory_fraction=0.7,
    ),
    "h200": RecipeLayout(gpu="h200", data=8, layers=23, token_budget=8192, engine=2, memory_fraction=0.7),
}
FP8_LAYOUTS = {
    "1gpu": Fp8Layout(layers=30, memory_fraction=0.5),
    "2gpus": Fp8Layout(layers=34),
    "4gpus": Fp8Layout(layers=32, memory_fraction=0.4),
    "1node": Fp8Layout(layers=31, memory_fraction=0.5),
    "2nodes": Fp8Layout(layers=31, memory_fraction=0.5),
    "4nodes": Fp8Layout(layers=18, memory_fraction=0.6),
    "16nodes": Fp8Layout(recompute="none", memory_fraction=0.7),
    "h200": Fp8Layout(layers=21, memory_fraction=0.6),
}
VARIANTS: dict[str, Variant] = {
    **variants(LAYOUTS, FP8_LAYOUTS, "1node"),
    **ARMS,
    **fp8_engine_variants(LAYOUTS, "1node", kv_heads=2),
}


def recipe() -> JobConfig:
    """Train with the 7B hyper-parameters, as in table 1 of the paper."""
    return LAYOUTS["1node"].apply(base("reasoning_3b", "Qwen/Qwen2.5-3B-Instruct"))
