"""The job of the studies: an agent on trails, where every tool result requires a decision (`arpo study`).

The variants are the arms of the studies; each sets only components and parameters.
"""

from dataclasses import replace

from arpo_megatron.config import AlgorithmConfig, DataConfig, EvalConfig, JobConfig, RolloutConfig, TrainConfig
from arpo_megatron.recipes._layouts import Variant
from arpo_megatron.recipes.quickstart import recipe as quickstart

VARIANTS: dict[str, Variant] = {
    "grpo": {"algorithm.name": "grpo"},
    "grpo_equal_calls": {"algorithm.name": "grpo", "algorithm.group_size": 6},
    "random": {"algorithm.name": "random"},
    "arpo_released": {"algorithm.name": "arpo_released"},
    "aepo": {"algorithm.name": "aepo"},
    "weight_0": {"algorithm.entropy_weight": 0.0},
    "weight_02": {"algorithm.entropy_weight": 0.2},
    "weight_5": {"algorithm.entropy_weight": 5.0},
    "initial_2": {"algorithm.initial_rollouts": 2},
    "initial_6": {"algorithm.initial_rollouts": 6},
    "beam_4": {"algorithm.beam_size": 4},
}
"""Arms of the studies. `grpo_equal_calls` has the number of samples with which it executes about as many calls per step
as `arpo`. The paper's entropy weight, 0.2, is meant for 20 tokens of a turn. Here few of the eight measured tokens are
uncertain (one after a search, three after python): dH is about 0.1, and a weight of 0.2 would change the chance of a
fork by 0.02. So the recipe has 2, and `weight_02` the paper's weight."""


def recipe() -> JobConfig:
    """Train the quickstart's model without one layer, 8 x 8 trajectories per step, evaluated every three steps."""
    job = quickstart()
    return replace(
        job,
        name="trails",
        data=DataConfig(kind="trails", tasks=4000, held_out=300),
        model=replace(job.model, layers=3),
        sft=replace(job.sft, steps=500, batch=48, mistake_share=0.6),
        algorithm=AlgorithmConfig(
            group_size=8, initial_rollouts=4, entropy_weight=2.0, clip_high=0.28, entropy_tokens=8, minibatches=2
        ),
        rollout=RolloutConfig(max_tool_calls=5, max_response_tokens=168, max_tool_tokens=48),
        optimizer=replace(job.optimizer, lr=1e-4),
        train=TrainConfig(steps=15, tasks_per_step=8, token_budget=4096, save_every=3),
        evaluation=EvalConfig(tasks=150, every=3),
    )
