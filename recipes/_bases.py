"""Bases of the recipes for real models: hyper-parameters of ARPO (arXiv 2507.19849) and of its released code.

A recipe sets what differs from one of these. `RECIPE+variant` applies a variant to it: a layout for a number of nodes,
FP8, or a comparison arm.
"""

from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    SandboxConfig,
    SftConfig,
    TrainConfig,
)
from arpo_megatron.recipes._layouts import Variant

ARMS: dict[str, Variant] = {
    "grpo": {"algorithm.name": "grpo"},
    "random": {"algorithm.name": "random"},
    "arpo_released": {"algorithm.name": "arpo_released"},
    "aepo": {"algorithm.name": "aepo"},
    "dapo": {"algorithm.name": "dapo"},
    "reinforce_plus_plus": {"algorithm.name": "reinforce_plus_plus"},
}
"""Comparison arms with the same number of samples: presets of these names (docs/reference/algorithms.md)."""

EVALUATION = EvalConfig(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
"""Sampling of the paper's evaluation; `arpo eval` uses it for its benchmarks, too."""


def _cluster(name: str, hub_id: str) -> JobConfig:
    """Return what all jobs on GPUs share, with the values of the released code if it has them."""
    return JobConfig(
        name=name,
        model=ModelConfig(hub_id=hub_id),
        parallel=ParallelConfig(distributed_optimizer=True),
        algorithm=AlgorithmConfig(minibatches=8),
        engine=EngineConfig(max_running_requests=256, startup_timeout_s=1800.0),
        sandbox=SandboxConfig(preload=("numpy", "sympy")),
        train=TrainConfig(save_every=5),
        monitor=MonitorConfig(peak_tflops=989.0),
    )


def reasoning(name: str = "reasoning", hub_id: str = "to be named") -> JobConfig:
    """Mathematics and knowledge with python and search: 10,000 questions, 2 epochs, 128 x 16 trajectories per step."""
    job = _cluster(name, hub_id)
    return replace(
        job,
        model=replace(job.model, max_length=1536 + 4096),
        data=DataConfig(kind="files", path=Path("train_10k.parquet"), max_prompt_tokens=1536),
        # A search shows ten pages of up to 1,000 characters, about 2,900 tokens at 3.5 characters per token: a response
        # holds one such result, or three of the released search cache, whose median is 1,625 characters.
        rollout=RolloutConfig(max_tool_calls=3, max_response_tokens=4096, max_tool_tokens=3072),
        sandbox=replace(job.sandbox, search_results=10),
        train=replace(job.train, steps=2 * 9800 // 128, tasks_per_step=128),
        evaluation=EVALUATION,
    )


def deep_search(name: str = "deep_search", hub_id: str = "to be named") -> JobConfig:
    """Web research: 1,000 questions, 5 epochs, 128 x 16 trajectories per step, six tool calls each."""
    job = _cluster(name, hub_id)
    return replace(
        job,
        model=replace(job.model, max_length=2000 + 10000),
        data=DataConfig(kind="files", path=Path("hard_search_1k.parquet"), max_prompt_tokens=2000, held_out=100),
        # A response holds three full results of ten pages, or six shorter ones.
        rollout=RolloutConfig(max_tool_calls=6, max_response_tokens=10000, max_tool_tokens=3072),
        sandbox=replace(job.sandbox, search_results=10),
        train=replace(job.train, steps=5 * 900 // 128, tasks_per_step=128),
        evaluation=replace(EVALUATION, tasks=100),
    )


def deep_search_large(name: str = "deep_search", hub_id: str = "to be named") -> JobConfig:
    """Deep search as the 14B model was trained: 64 x 12 trajectories per step, shorter responses."""
    job = deep_search(name, hub_id)
    return replace(
        job,
        model=replace(job.model, max_length=2000 + 6192),
        algorithm=replace(job.algorithm, group_size=12, initial_rollouts=6),
        rollout=replace(job.rollout, max_response_tokens=6192),
        train=replace(job.train, steps=5 * 900 // 64, tasks_per_step=64),
    )


def sft(name: str = "sft", hub_id: str = "to be named") -> JobConfig:
    """Cold start as the authors train it: 3 epochs of 54,000 conversations in batches of 16, 15,000 tokens.

    Their script (LLaMA-Factory/arpo_train_sft of the released code) leaves AdamW at the defaults of transformers.
    """
    job = _cluster(name, hub_id)
    return replace(
        job,
        model=replace(job.model, max_length=15000),
        sft=SftConfig(
            steps=3 * 54000 // 16,
            data=Path("final_5w4_still.jsonl"),
            held_out_share=0.01,
            batch=16,
            optimizer=OptimizerConfig(
                lr=7e-6, schedule="cosine", min_lr_ratio=0.0, warmup_fraction=0.1, weight_decay=0.0, beta2=0.999
            ),
        ),
    )
