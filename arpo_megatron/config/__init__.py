"""Every knob of a job: typed, frozen, documented, and strict.

A recipe (a function in `recipes/`) returns a `JobConfig`; `--config file.yaml` and `key=value` words are laid over it
by `resolve`. An unknown key, a wrong type or an impossible combination raises `UserError` with one line before any
process is started. The attribute docstrings are the reference: docs/configuration.md is generated from them.
"""

from arpo_megatron.config.algorithm import AlgorithmConfig, DataConfig, JudgeConfig, RewardConfig
from arpo_megatron.config.fields import Fp8Recipe, Platform
from arpo_megatron.config.job import JobConfig
from arpo_megatron.config.model import ModelConfig, ParallelConfig
from arpo_megatron.config.services import EngineConfig, RolloutConfig, SandboxConfig, SyncConfig
from arpo_megatron.config.training import EvalConfig, MonitorConfig, OptimizerConfig, SftConfig, TrainConfig

__all__ = [
    "AlgorithmConfig",
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
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "SftConfig",
    "SyncConfig",
    "TrainConfig",
]
