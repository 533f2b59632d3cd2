"""Real steps on the released ARPO training questions with a tiny model: the data path of the 7B recipes, on a CPU.

    arpo train reasoning_tiny data.path=train_10k.parquet

The model is generated and knows nothing, so its reward stays near the format penalty. The recipe shows that questions,
protocol, tools and trainer fit together.
"""

from pathlib import Path

from arpo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)


def recipe() -> JobConfig:
    """Train three steps on four questions with eight trajectories each."""
    return JobConfig(
        name="reasoning_tiny",
        model=ModelConfig(
            dtype="float32", hidden_size=128, layers=2, heads=4, kv_heads=2, ffn_size=256, max_length=2048
        ),
        data=DataConfig(kind="files", path=Path("train_10k.parquet"), held_out=16),
        algorithm=AlgorithmConfig(group_size=8, initial_rollouts=4, minibatches=2),
        rollout=RolloutConfig(max_tool_calls=3, max_response_tokens=256, max_tool_tokens=128),
        optimizer=OptimizerConfig(lr=1e-4),
        train=TrainConfig(steps=3, tasks_per_step=4, token_budget=8192),
        engine=EngineConfig(max_running_requests=32, max_total_tokens=65536, memory_fraction=0.1),
        evaluation=EvalConfig(tasks=8, before=False, after=False),
    )
