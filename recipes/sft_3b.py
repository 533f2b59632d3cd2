"""Cold start of Qwen2.5 3B on tool-using conversations, before reasoning_3b.

    arpo sft sft_3b model.path=DIR sft.data=FILE.jsonl

Model: Qwen/Qwen2.5-3B-Instruct. Data: dongguanting/ARPO-SFT-54K as it is, or other rows with `messages`.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import sft as base
from arpo_megatron.recipes._layouts import Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(data=8, layers=6, token_budget=8192),
    "2nodes": RecipeLayout(data=4, pipeline=2, virtual_pipeline=2, context=2, recompute="none"),
    "4nodes": RecipeLayout(tensor=2, data=4, pipeline=2, context=2, recompute="none"),
    "16nodes": RecipeLayout(tensor=2, data=16, pipeline=2, context=2, recompute="none"),
    "h200": RecipeLayout(gpu="h200", data=8, recompute="none", token_budget=8192),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=4),
    "2nodes": Fp8Layout(recompute="none"),
    "4nodes": Fp8Layout(recompute="none"),
    "16nodes": Fp8Layout(recompute="none"),
    "h200": Fp8Layout(recompute="none"),
}
VARIANTS: dict[str, Variant] = variants(LAYOUTS, FP8_LAYOUTS, "1node")


def recipe() -> JobConfig:
    """Train three epochs on one node."""
    return LAYOUTS["1node"].apply(base("sft_3b", "Qwen/Qwen2.5-3B-Instruct"))
