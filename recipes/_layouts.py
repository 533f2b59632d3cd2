"""Layouts of a job on GPUs: the values in which the layouts of a recipe differ, as a config and as a variant.

Each is the first layout that `arpo plan` finds for its number of GPUs and its placement (tests/plan/test_defaults.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from arpo_megatron.config import JobConfig, ParallelConfig, RecomputedModule

Variant = dict[str, object]
"""Values by dotted config key, which `RECIPE+variant` applies to the recipe."""

Recompute = Literal["none", "full"] | tuple[RecomputedModule, ...]
"""Layers, or the modules of layers, that are computed again in the backward pass."""

_MODULES = ParallelConfig().recompute_modules


@dataclass(frozen=True, slots=True)
class RecipeLayout:
    """Trainer ranks, and engines that share their GPUs (with `split`: that have `engines` x `engine` other GPUs)."""

    gpu: str = "h100-80"
    """GPU that the layout is for (`arpo plan --gpu`)."""
    tensor: int = 1
    """Tensor-parallel ranks; above 1 with sequence parallelism."""
    data: int = 1
    """Data-parallel ranks."""
    pipeline: int = 1
    """Pipeline stages."""
    virtual_pipeline: int = 1
    """Chunks of layers per pipeline stage."""
    context: int = 1
    """Context-parallel ranks."""
    expert: int = 1
    """Expert-parallel ranks."""
    recompute: Recompute = "full"
    """Layers or modules that are computed again in the backward pass."""
    layers: int | None = None
    """Number of layers of each chunk that `full` computes again; None: all."""
    token_budget: int = 16384
    """Tokens per pack."""
    group_tokens: int | None = None
    """Tokens per group of a cut tree in a pipeline or with experts on several ranks; None: whole trees."""
    engine: int = 1
    """GPUs per engine."""
    engines: int = 0
    """Number of engines; 0: as many as the trainer's GPUs hold."""
    memory_fraction: float = 0.3
    """Share of a GPU for the engine's weights and KV pool."""
    offload: bool = False
    """Keep the optimizer state in host memory."""
    split: bool = False
    """Give the engines GPUs of their own, and sample while the trainer trains on the trees of the step before."""

    def variant(self) -> Variant:
        """Return all of its keys, so that it replaces another layout completely."""
        return {
            "parallel.tensor": self.tensor,
            "parallel.sequence": self.tensor > 1,
            "parallel.data": self.data,
            "parallel.pipeline": self.pipeline,
            "parallel.virtual_pipeline": self.virtual_pipeline,
            "parallel.context": self.context,
            "parallel.expert": self.expert,
            **_recomputation(self.recompute, self.layers),
            "train.token_budget": self.token_budget,
            "train.group_tokens": self.group_tokens,
            "engine.tensor": self.engine,
            "engine.replicas": self.engine_gpus // self.engine,
            "engine.memory_fraction": self.memory_fraction,
            "engine.placement": "split" if self.split else "colocated",
            "optimizer.offload": self.offload,
            "rollout.max_staleness": int(self.split),
        }

    @property
    def _ranks(self) -> int:
        return self.tensor * self.data * self.pipeline * self.context

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.engine or self._ranks

    def apply(self, job: JobConfig) -> JobConfig:
        """Return the job in this layout."""
        sections: dict[str, dict[str, object]] = {}
        for key, value in self.variant().items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {section: replace(getattr(job, section), **values) for section, values in sections.items()}
        return replace(job, **changed)


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """The values of a layout that differ with FP8, whose copies of the weights stay on the GPU."""

    recompute: Recompute = "full"
    """Layers or modules that are computed again in the backward pass."""
    layers: int | None = None
    """Number of layers of each chunk that `full` computes again; None: all."""
    memory_fraction: float = 0.3
    """Share of a GPU for the engine's weights and KV pool."""

    def variant(self) -> Variant:
        """Return all of its keys."""
        return {**_recomputation(self.recompute, self.layers), "engine.memory_fraction": self.memory_fraction}


def _recomputation(recompute: Recompute, layers: int | None) -> Variant:
    return {
        "parallel.recompute": recompute if isinstance(recompute, str) else "selective",
        "parallel.recompute_layers": layers,
        "parallel.recompute_modules": _MODULES if isinstance(recompute, str) else recompute,
    }


def variants(layouts: Mapping[str, RecipeLayout], fp8: Mapping[str, Fp8Layout], own: str) -> dict[str, Variant]:
    """Return the overrides of each layout by its name, and those of FP8 in the recipe's own layout and in the others.

    With FP8, activations in the trainer's matrix products have a scale for 128 features of a token, or for 128 tokens
    in the products for weight gradients; weights have one for a 128 x 128 block. First and last layer are bfloat16.

    Args:
        layouts: layouts of a recipe.
        fp8: their values with FP8. A layout that is not among them recomputes all layers.
        own: the layout that the recipe has without a variant.
    """
    fitted = {name: fp8.get(name, Fp8Layout()).variant() for name in layouts}
    return {
        **{name: layout.variant() for name, layout in layouts.items()},
        "fp8": {"model.fp8": "blockwise", "model.bf16_edge_layers": 1, **fitted[own]},
        **{f"{name}+fp8": values for name, values in fitted.items()},
    }


FP8_ENGINE: Variant = {"engine.quantization": "fp8"}
"""Rollouts with quantized weights, whose difference `algorithm.sampling_correction` corrects."""


def fp8_engine_variants(
    layouts: Mapping[str, RecipeLayout], own: str, kv_heads: int, *, whole_experts: bool = False
) -> dict[str, Variant]:
    """Return `fp8_engine` of a recipe whose layouts have engines with more GPUs than the model has key/value heads.

    Such an engine becomes several on the same GPUs.

    Args:
        layouts: layouts of the recipe.
        own: the layout that the recipe has without a variant.
        kv_heads: the most GPUs of an engine with FP8.
        whole_experts: every GPU of an engine has whole experts, because a part would not consist of whole blocks.
    """
    fitted: dict[str, Variant] = {}
    for name, layout in layouts.items():
        size = min(kv_heads, layout.engine)
        fitted[name] = {"engine.tensor": size, "engine.replicas": layout.engine_gpus // size}
        if whole_experts:
            fitted[name]["engine.expert"] = size
    return {
        "fp8_engine": {**FP8_ENGINE, **fitted[own]},
        **{f"{name}+fp8_engine": keys for name, keys in fitted.items()},
    }
