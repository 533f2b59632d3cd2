"""Qwen3 30B-A3B, 8 of 128 experts per token, learns deep search with the hyper-parameters of the 14B run.

    arpo train moe_30b_a3b model.path=DIR data.path=hard_search_1k.parquet

In training each token goes to the experts that the engine chose for it (arXiv 2510.11370).
Model: Qwen/Qwen3-30B-A3B. Data: dongguanting/ARPO-RL-DeepSearch-1K.
"""

from dataclasses import replace

from arpo_megatron.config import JobConfig
from arpo_megatron.recipes._bases import ARMS
from arpo_megatron.recipes._bases import deep_search_large as base
from arpo_megatron.recipes._layouts import FP8, RecipeLayout, Variant, asynchronous, variants

LAYOUTS = {
    "1node": RecipeLayout(tensor=4, data=2, expert=8, engine=4, memory_fraction=0.4, offload=True),
    "2nodes": RecipeLayout(tensor=4, data=4, expert=8, engine=4, memory_fraction=0.45, offload=True),
    "4nodes": RecipeLayout(tensor=4, data=8, expert=8, engine=4, memory_fraction=0.35),
    "16nodes": RecipeLayout(tensor=4, data=8, pipeline=4, expert=8, engine=4, memory_fraction=0.5),
    "h200": RecipeLayout(tensor=4, data=4, expert=8, engine=4, memory_fraction=0.4),
}
VARIANTS: dict[str, Variant] = {**variants(LAYOUTS), "split": asynchronous(LAYOUTS["2nodes"]), **ARMS, "fp8": FP8}


def recipe() -> JobConfig:
    """Train on 64 questions with 12 trajectories each per step, on four nodes."""
    job = base("moe_30b_a3b", "Qwen/Qwen3-30B-A3B")
    return LAYOUTS["4nodes"].apply(replace(job, algorithm=replace(job.algorithm, router_replay="rollout")))
