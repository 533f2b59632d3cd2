"""Layouts of a job on GPUs: the values in which the layouts of a recipe differ, as a config and as a variant."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from arpo_megatron.config import JobConfig

Variant = dict[str, object]
"""Values by dotted config key, which `RECIPE+variant` applies to the recipe."""


@dataclass(frozen=True, slots=True)
class RecipeLayout:
    """Trainer ranks, and engines that share their GPUs (with `split`: that have the same number of other GPUs)."""

    tensor: int = 1
    """Tensor-parallel ranks; above 1 with sequence parallelism."""
    data: int = 1
    """Data-parallel ranks."""
    pipeline: int = 1
    """Pipeline stages."""
    expert: int = 1
    """Expert-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "full"
    """Activations computed again in the backward pass."""
    token_budget: int = 16384
    """Tokens per pack."""
    engine: int = 1
    """GPUs per engine; the number of engines follows from the number of GPUs."""
    memory_fraction: float = 0.3
    """Share of a GPU for the engine's weights and KV pool."""
    offload: bool = False
    """Keep the optimizer state in host memory."""
    split: bool = False
    """Give the engines GPUs of their own."""

    @property
    def engines(self) -> int:
        """Number of engines that the trainer's GPUs hold."""
        return self.tensor * self.data * self.pipeline // self.engine

    def variant(self) -> Variant:
        """Return all of its keys, so that it replaces another layout completely."""
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

    def apply(self, job: JobConfig) -> JobConfig:
        """Return the job in this layout."""
        sections: dict[str, dict[str, object]] = {}
        for key, value in self.variant().items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {section: replace(getattr(job, section), **values) for section, values in sections.items()}
        return replace(job, **changed)


def variants(layouts: Mapping[str, RecipeLayout]) -> dict[str, Variant]:
    """Return layouts as variants: `1node`, `2nodes`, ... for nodes of eight H100 80 GB, others named by GPU."""
    return {name: layout.variant() for name, layout in layouts.items()}


FP8: Variant = {"model.fp8": "blockwise", "model.bf16_edge_layers": 1}
"""The trainer's matrix products in FP8 with a scale for 128 features of a token; first and last layer in bfloat16."""

FP8_ENGINE: Variant = {"engine.quantization": "fp8"}
"""Rollouts with quantized weights, whose difference `algorithm.sampling_correction` corrects; not for models with
normed heads."""


def asynchronous(layout: RecipeLayout) -> Variant:
    """Return the layout with as many GPUs again for engines, and rollouts that overlap with training."""
    split = replace(layout, split=True, memory_fraction=0.85)
    return {**split.variant(), "rollout.max_staleness": 1}
