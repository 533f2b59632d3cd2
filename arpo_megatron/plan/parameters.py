"""Parameter counts of a model and of one rank. They are exact: tests build models on the meta device and compare."""

from dataclasses import dataclass
from functools import cache

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters of a model or of a part of it."""

    dense: int
    """All parameters except the experts'."""
    experts: int
    """Parameters of experts, which have other data-parallel groups; 0 without experts."""
    products: int
    """Parameters of the layers' matrices, including experts: FP8 copies these."""

    @property
    def total(self) -> int:
        """Number of all parameters, experts included."""
        return self.dense + self.experts


def whole_model(spec: ModelSpec) -> Parameters:
    """Return the parameters of the model."""
    return stage_parameters(spec, ParallelConfig(), 0)


def active_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters that process one token: of a mixture, only the experts that it is routed to."""
    whole = whole_model(spec)
    if spec.experts is None:
        return whole.total
    return whole.dense + whole.experts * spec.experts.top_k // spec.experts.count


def replica_counts(parallel: ParallelConfig) -> tuple[int, int]:
    """Return the numbers of ranks with the same dense parameters and with the same experts.

    These ranks reduce gradients and, with the distributed optimizer, shard its work and state.
    """
    dense = parallel.data * parallel.context
    return dense, max(1, parallel.tensor * dense // (parallel.expert * parallel.expert_tensor))


def optimizer_parameters(held: Parameters, parallel: ParallelConfig) -> float:
    """Return the number of a rank's parameters whose optimizer state it keeps."""
    if not parallel.distributed_optimizer:
        return held.total
    dense, experts = replica_counts(parallel)
    return held.dense / dense + held.experts / experts


@cache
def stage_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> Parameters:
    """Return the parameters of each rank of a pipeline stage.

    Tensor parallelism divides matrices, but not norms and the router. Expert parallelism divides whole experts
    (`ParallelConfig.expert_tensor`). The first stage has the embedding, the last one the final norm and the head. With
    tied embeddings the head is a copy of the embedding unless one stage has both.
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
