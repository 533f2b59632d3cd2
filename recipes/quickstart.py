"""The default job on two CPU cores: a tiny agent learns to use a calculator and a fact search in minutes."""

from arpo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SandboxConfig,
    SftConfig,
    TrainConfig,
)


def recipe() -> JobConfig:
    """Train a generated 0.9M-parameter Qwen3 on demonstrations with mistakes, then with ARPO."""
    return JobConfig(
        name="quickstart",
        model=ModelConfig(dtype="float32", max_length=192),
        data=DataConfig(kind="generated", tasks=2000, held_out=300),
        sft=SftConfig(
            steps=400,
            batch=48,
            mistake_share=0.5,
            optimizer=OptimizerConfig(lr=2e-3, schedule="linear", warmup_fraction=0.08, beta2=0.98),
        ),
        algorithm=AlgorithmConfig(group_size=8, initial_rollouts=4, clip_high=0.28, entropy_tokens=8, minibatches=2),
        rollout=RolloutConfig(max_tool_calls=3, max_response_tokens=128, max_tool_tokens=48),
        optimizer=OptimizerConfig(lr=3e-4, schedule="linear"),
        train=TrainConfig(steps=28, tasks_per_step=16, token_budget=4096),
        engine=EngineConfig(max_running_requests=64, max_total_tokens=32768, memory_fraction=0.1),
        # Its code is written by a model this small: it also runs on machines without namespaces, which a line reports.
        sandbox=SandboxConfig(search_results=1, isolation="process"),
        evaluation=EvalConfig(tasks=300),
    )
