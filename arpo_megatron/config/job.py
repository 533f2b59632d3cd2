"""The job as a whole: the sections, and the values derived from several of them."""

import math
import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
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


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise ValueError(f"name={text} must consist of letters, digits, _ . and -")
    return text


@dataclass(frozen=True, config=STRICT)
class JobConfig:
    """A whole job, as a recipe returns it."""

    name: Annotated[str, AfterValidator(_name)]
    """Name of the recipe; part of the run directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of everything random; the engine takes 32 bits."""
    platform: Platform = "auto"
    """`auto`: use the GPUs of this machine if it has any. `cpu`: use none."""
    run_dir: Path | None = None
    """Run directory of the job; None: the next free runs/<name>-<algorithm>-seed<seed>."""
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
        """Whether the job only does supervised training: it has conversations and no other tasks for the ARPO loop."""
        return self.sft.data is not None and self.data.is_generated

    def trees_in_flight(self, step: int) -> int:
        """Return the number of training trees in flight when a step (from 0) begins, at most those that the run can
        still train.
        """
        if self.rollout.max_staleness:
            return min(2, self.train.steps - step) * self.train.tasks_per_step
        return math.ceil(self.train.tasks_per_step * (1 + self.rollout.oversampling))

    @property
    def pack_multiple(self) -> int:
        """Return the multiple to which the tokens of a rank are padded.

        Sequence parallelism divides the tokens among tensor-parallel ranks, and FP8 products need multiples on every
        rank.
        """
        return validation.FP8_TOKENS[self.model.fp8] * (self.parallel.tensor if self.parallel.sequence else 1)
