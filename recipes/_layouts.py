"""Layouts of a job on GPUs, as its config and as the keys of a variant."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from arpo_megatron.config import JobConfig

Variant = dict[str, object]
"""Dotted config keys and their values, which `RECIPE+variant` sets."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Trainer ranks, and engines that share their GPUs or, with `split`, have as many others."""

    tensor: int = 1
    """Tensor-parallel ranks; above 1 with sequence parallelism."""
    data: int = 1
    """Data-parallel ranks."""
    pipeline: int = 1
    """Pipeline stages."""
    expert: int = 1
    """Expert-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "full"
    """Activations that are computed again."""
    token_budget: int = 16384
    """Tokens of a pack."""
    engine: int = 1
    """GPUs of an engine; engines fill the GPUs."""
    memory_fraction: float = 0.3
    """Share of a GPU for the engine's weights and KV pool."""
    offload: bool = False
    """Keep optimizer state in host memory."""
    split: bool = False
    """Give engines separate GPUs."""

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.tensor * self.data * self.pipeline // self.engine

    def variant(self) -> Variant:
        """Return all keys of the layout, so that it replaces another layout completely."""
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
        """Return the job in this layout."""
        sections: dict[str, dict[str, object]] = {}
        for key, value in self.variant().items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {section: replace(getattr(job, section), **values) for section, values in sections.items()}
        return replace(job, **changed)


def variants(layouts: Mapping[str, Layout]) -> dict[str, Variant]:
    """Return the variants of layouts by name: `2nodes` means nodes of eight H100 80 GB, others name their GPU."""
    return {name: layout.variant() for name, layout in layouts.items()}


FP8: Variant = {"model.fp8": "blockwise", "model.bf16_edge_layers": 1}
"""The trainer's products in FP8, one scale per 128 features of a token; first and last layer in bfloat16."""

FP8_ENGINE: Variant = {"engine.quantization": "fp8", "algorithm.trajectory_weight_limit": 2.0}
"""Rollouts with quantized weights, corrected by importance weights; not for models with head norms."""


def asynchronous(layout: Layout) -> Variant:
    """Return the variant with as many GPUs for engines, on which trees grow while the trainer trains."""
    split = replace(layout, split=True, memory_fraction=0.85)
    return {**split.variant(), "rollout.max_staleness": 1, "algorithm.trajectory_weight_limit": 2.0}
