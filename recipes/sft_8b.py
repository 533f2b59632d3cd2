"""Cold start of Llama 3.1 8B on tool-using conversations, before reasoning_8b.

    arpo sft sft_8b model.path=DIR sft.data=FILE.jsonl

Model: meta-llama/Llama-3.1-8B-Instruct. Data: dongguanting/ARPO-SFT-54K as it is, or other rows with `messages`.
"""

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import sft as base
from arpo_megatron.recipes._layouts import Fp8Layout, RecipeLayout, Variant, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=2, data=4, layers=5, token_budget=8192),
    "2nodes": RecipeLayout(tensor=2, data=4, pipeline=2, virtual_pipeline=2, recompute="none"),
    "4nodes": RecipeLayout(tensor=8, data=4, recompute="none", token_budget=8192),
    "16nodes": RecipeLayout(tensor=8, data=16, recompute="none", token_budget=8192),
    "h200": RecipeLayout(gpu="h200", data=8, layers=6, token_budget=8192),
}
FP8_LAYOUTS = {
    "1node": Fp8Layout(layers=6),
    "2nodes": Fp8Layout(recompute="none"),
    "4nodes": Fp8Layout(recompute="none"),
    "16nodes": Fp8Layout(recompute="none"),
    "h200": Fp8Layout(layers=8),
}
VARIANTS: dict[str, Variant] = variants(LAYOUTS, FP8_LAYOUTS, "1node")


def recipe() -> JobConfig:
    """Train three epochs on one node."""
    return LAYOUTS["1node"].apply(base("sft_8b", "meta-llama/Llama-3.1-8B-Instruct"))
