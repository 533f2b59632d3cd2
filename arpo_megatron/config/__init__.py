"""All settings of a job: typed, frozen, documented and strict, one section per file.

A recipe (a function in `recipes/`) returns a `JobConfig`; `arpo_megatron.jobs.resolve` applies a `--config` file and
`key=value` overrides to it. An unknown key, a wrong type or an impossible combination raises `UserError` with one line
before any process starts. The attribute docstrings are the reference, from which docs/reference/configuration.md is
generated. May import `utils`, `errors` and `tools_sandbox.utils` only.
"""

from arpo_megatron.config.algorithm import AlgorithmConfig
from arpo_megatron.config.data import DataConfig
from arpo_megatron.config.engine import EngineConfig
from arpo_megatron.config.evaluation import EvalConfig
from arpo_megatron.config.fields import AttentionBackend, Fp8Recipe, Platform
from arpo_megatron.config.job import JobConfig
from arpo_megatron.config.model import ModelConfig
from arpo_megatron.config.monitor import MonitorConfig
from arpo_megatron.config.optimizer import OptimizerConfig
from arpo_megatron.config.parallel import ParallelConfig, Recompute, RecomputedModule
from arpo_megatron.config.reward import JudgeConfig, RewardConfig
from arpo_megatron.config.rollout import RolloutConfig
from arpo_megatron.config.sandbox import SandboxConfig
from arpo_megatron.config.sft import SftConfig
from arpo_megatron.config.sync import SyncConfig
from arpo_megatron.config.train import TrainConfig

__all__ = [
    "AlgorithmConfig",
    "AttentionBackend",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "Fp8Recipe",
    "JobConfig",
    "JudgeConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Platform",
    "Recompute",
    "RecomputedModule",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "SftConfig",
    "SyncConfig",
    "TrainConfig",
]
