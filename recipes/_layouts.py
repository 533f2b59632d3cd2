"""How a job lies on GPUs: what the layouts of a recipe differ in, as a job's config and as a variant's keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from arpo_megatron.config import JobConfig

Variant = dict[str, object]
"""Config keys, dotted, and their values: what `RECIPE+variant` lays over the recipe."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Trainer ranks, and engines that share their GPUs (or, with `split`, have as many of their own).

    Attributes:
        tensor: tensor-parallel ranks; above 1 with sequence parallelism.
        data: data-parallel ranks.
        pipeline: pipeline stages.
        expert: ranks that share out the experts.
        recompute: activations computed again.
        token_budget: tokens of a pack.
        engine: GPUs of an engine; there are as many engines as the GPUs make.
        memory_fraction: of a GPU for the engine's weights and KV pool.
        offload: optimizer state in host memory.
        split: engines have GPUs of their own.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1
    recompute: Literal["none", "selective", "full"] = "full"
    token_budget: int = 16384
    engine: int = 1
    memory_fraction: float = 0.3
    offload: bool = False
    split: bool = False

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.tensor * self.data * self.pipeline // self.engine

    def variant(self) -> Variant:
        """All of its keys, so that it replaces another layout whole."""
        return {
            "parallel.tensor": self.tensor,
            "parallel.sequence": self.tensor > 1,
            "parallel.data": self.data,
            "parallel.pipeline": self.pipeline,
            "parallel.expert": self.expert,
            "parallel.recompute": self.recompute,
            "train.token_budget": self.token_budget,
            "engine.tensor": self.engine,
            "engine.replicas": self.engines,
            "engine.memory_fraction": self.memory_fraction,
            "engine.placement": "split" if self.split else "colocated",
            "optimizer.offload": self.offload,
        }

    def of(self, job: JobConfig) -> JobConfig:
        """The job in this layout."""
        sections: dict[str, dict[str, object]] = {}
        for key, value in self.variant().items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {section: replace(getattr(job, section), **values) for section, values in sections.items()}
        return replace(job, **changed)


def variants(layouts: Mapping[str, Layout]) -> dict[str, Variant]:
    """Those of layouts by name: `1node`, `2nodes`, ... for H100 80 GB, eight a node, and others by their GPU."""
    return {name: layout.variant() for name, layout in layouts.items()}


FP8: Variant = {"model.fp8": "blockwise", "model.bf16_edge_layers": 1}
"""The trainer's products in FP8, a scale for 128 features of a token; the first and the last layer in bfloat16."""

FP8_ENGINE: Variant = {"engine.quantization": "fp8", "algorithm.trajectory_weight_limit": 2.0}
"""Rollouts with quantized weights, and trajectories weighed for the difference; not for models with normed heads."""


def asynchronous(layout: Layout) -> Variant:
    """The layout with as many GPUs again for engines, and trees that grow while the trainer trains."""
    split = replace(layout, split=True, memory_fraction=0.85)
    return {**split.variant(), "rollout.max_staleness": 1, "algorithm.trajectory_weight_limit": 2.0}
