"""Parameters of a model, and of one rank of it. Exact: tests build the models on the meta device and count."""

from dataclasses import dataclass

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        dense: of all but the experts.
        experts: of the experts (0 without any), whose data-parallel ranks are others.
        products: of the layers' matrices, experts included: what FP8 makes copies of.
    """

    dense: int
    experts: int
    products: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def whole_model(spec: ModelSpec) -> Parameters:
    """Of the model."""
    return of_stage(spec, ParallelConfig(), 0)


def active(spec: ModelSpec) -> int:
    """Parameters that a token meets: of a mixture's experts those that it is sent to."""
    whole = whole_model(spec)
    if spec.experts is None:
        return whole.total
    return whole.dense + whole.experts * spec.experts.top_k // spec.experts.count


def copies(parallel: ParallelConfig) -> tuple[int, int]:
    """How many ranks hold the same parameters: of all but the experts, and of the experts.

    So many reduce the gradients among them and, with the distributed optimizer, share out its work and state.
    """
    dense = parallel.data * parallel.context
    return dense, max(1, parallel.tensor * dense // (parallel.expert * parallel.expert_tensor))


def updated(held: Parameters, parallel: ParallelConfig) -> float:
    """Parameters whose optimizer state one rank keeps, of those that it holds."""
    if not parallel.distributed_optimizer:
        return held.total
    dense, experts = copies(parallel)
    return held.dense / dense + held.experts / experts


def of_stage(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> Parameters:
    """Of each rank of a pipeline stage.

    Matrices are divided among tensor-parallel ranks, norms and the router are not; expert parallelism divides whole
    experts (`ParallelConfig.expert_tensor`). The first stage has the embedding, the last one the final norm and the
    head, which with tied embeddings is a copy of the embedding unless one stage has both.
    """
    tensor, stages = parallel.tensor, parallel.pipeline
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = (spec.hidden * (queries + 2 * keys) + queries * spec.hidden) // tensor
    small = 2 * spec.hidden
    small += (queries + 2 * keys) // tensor if spec.qkv_bias else 0
    small += 2 * spec.head_dim if spec.qk_norm else 0
    mlp = 3 * spec.hidden * spec.ffn
    dense, experts = attention + small, 0
    if spec.experts is None:
        dense += mlp // tensor
    else:
        dense += spec.hidden * spec.experts.count
        experts = spec.experts.count // parallel.expert * mlp // parallel.expert_tensor
    layers = spec.layers // stages
    embedding = spec.vocabulary * spec.hidden // tensor
    first, last = stage == 0, stage == stages - 1
    ends = (embedding if first else 0) + (spec.hidden if last else 0)
    if last and not (spec.tied and first):
        ends += embedding
    products = attention + (mlp // tensor if spec.experts is None else experts)
    return Parameters(layers * dense + ends, layers * experts, layers * products)
