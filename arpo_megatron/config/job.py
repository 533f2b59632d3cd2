"""The job as a whole."""

import math
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config import validation
from arpo_megatron.config.algorithm import AlgorithmConfig
from arpo_megatron.config.data import DataConfig
from arpo_megatron.config.engine import EngineConfig
from arpo_megatron.config.evaluation import EvalConfig
from arpo_megatron.config.fields import STRICT, Platform
from arpo_megatron.config.model import ModelConfig
from arpo_megatron.config.monitor import MonitorConfig
from arpo_megatron.config.optimizer import OptimizerConfig
from arpo_megatron.config.parallel import ParallelConfig
from arpo_megatron.config.reward import RewardConfig
from arpo_megatron.config.rollout import RolloutConfig
from arpo_megatron.config.sandbox import SandboxConfig
from arpo_megatron.config.sft import SftConfig
from arpo_megatron.config.sync import SyncConfig
from arpo_megatron.config.train import TrainConfig


@dataclass(frozen=True, config=STRICT)
class JobConfig:
    """A whole job: what a recipe returns."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Recipe name; part of the run directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Everything random follows from it; the engine takes 32 bits."""
    platform: Platform = "auto"
    """`auto`: the GPUs of this machine, where it has any. `cpu`: leave them alone."""
    run_dir: Path | None = None
    """Where the job writes; None: the next free runs/<name>-<algorithm>-seed<seed>."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SftConfig = SftConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvalConfig = EvalConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        validation.check_job(self)
        return self

    @property
    def sft_only(self) -> bool:
        """Whether it is supervised training alone: conversations, and no tasks of one's own for the ARPO loop."""
        return self.sft.data is not None and self.data.is_generated

    def trees_in_flight(self, step: int) -> int:
        """Training trees wanted when a step (from 0) begins, never more than the rest of the run can train."""
        if self.rollout.max_staleness:
            return min(2, self.train.steps - step) * self.train.tasks_per_step
        return math.ceil(self.train.tasks_per_step * (1 + self.rollout.oversampling))

    @property
    def pack_multiple(self) -> int:
        """A rank's tokens are padded to a multiple of this.

        Sequence parallelism divides them among tensor-parallel ranks, and FP8 products want multiples on every rank.
        """
        return validation.FP8_TOKENS[self.model.fp8] * (self.parallel.tensor if self.parallel.sequence else 1)
