"""Section `parallel`: the layout of Megatron-Core over ranks."""

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config import validation
from arpo_megatron.config.fields import STRICT, Positive, PositiveFloat

Recompute = Literal["none", "selective", "full"]
RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe_act"]


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """The layout of the model over trainer ranks. World size = tensor * context * pipeline * data."""

    tensor: Positive = 1
    """Tensor-parallel ranks."""
    data: Positive = 1
    """Data-parallel ranks."""
    pipeline: Positive = 1
    """Pipeline stages."""
    virtual_pipeline: Positive = 1
    """Model chunks per stage (interleaved schedule); above 1 it needs pipeline > 1."""
    context: Positive = 1
    """Context-parallel ranks: the tokens of a pack are divided among them."""
    expert: Positive = 1
    """Ranks that divide the experts of a mixture of experts; a divisor of tensor * context * data."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group; needs tensor > 1."""
    distributed_optimizer: bool = False
    """Divide the optimizer's state among the data-parallel ranks."""
    recompute: Recompute = "none"
    """Activations computed again in the backward pass: none, those of some modules (`selective`), or those of whole
    layers (`full`)."""
    recompute_modules: tuple[RecomputedModule, ...] = ("mlp", "moe_act")
    """Modules that `selective` computes again, by Megatron's names: `mlp` (dense models), `core_attn`, and with
    Transformer Engine `moe_act` (the experts' activation function) and `layernorm` (norms that are not part of a linear
    layer). Modules that a model does not have are ignored. Attention costs much time and saves little: it stores no
    scores."""
    recompute_layers: Positive | None = None
    """Layers of each model chunk that `full` computes again, the first ones; None: all. At most the layers of a
    chunk."""

    collective_timeout_s: PositiveFloat = 1800.0
    """Seconds without progress of any rank after which the job ends as hung, with the stacks of all ranks in
    `heartbeats/`. It must exceed the longest save, kernel compilation or silence of all rollouts; on Slurm also 60 s,
    which a step that has ended may wait for the reports of its nodes."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks: tensor * context * pipeline * data."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_tensor(self) -> int:
        """Number of tensor-parallel ranks that divide an expert.

        With expert parallelism experts stay whole: the ranks of a divided expert would have to gather unequal numbers
        of tokens after every exchange, which gloo cannot do, for slices too thin to be fast. Without it experts are
        divided like every other matrix, because Megatron sums the gradients of whole ones over data-parallel ranks
        only.
        """
        return self.tensor if self.expert == 1 else 1

    @property
    def nested_packs(self) -> bool:
        """Whether passes of a cut tree's packs are nested, so that only one path of packs is in memory. Pipelines and
        expert parallelism keep a whole group of packs (`train.group_tokens`).
        """
        return self.pipeline == 1 and self.expert == 1

    def recomputed_share(self, layers: int) -> float:
        """Return the share of a model's `layers` layers that are computed again as a whole."""
        if self.recompute != "full":
            return 0.0
        chunk = layers // (self.pipeline * self.virtual_pipeline)
        return 1.0 if self.recompute_layers is None else self.recompute_layers / chunk

    def recomputes(self, module: RecomputedModule) -> bool:
        """Return whether `selective` computes a module again."""
        return self.recompute == "selective" and module in self.recompute_modules

    @model_validator(mode="after")
    def _check(self) -> Self:
        validation.check_parallel(self)
        return self
