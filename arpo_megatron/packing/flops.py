"""FLOPs of an update, and the share of the machine's peak it reached.

Model FLOPs are those the mathematics needs, counted as in PaLM (arXiv 2204.02311, appendix B): two per weight and token
in every matrix product; in attention, four per head width, query and visible key; twice as much again in the backward
pass. Tokens are those of the tree, not of the flattened trajectories: sharing shows as less time, not as more FLOP/s.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.layout import TreePack

BACKWARD = 2.0
"""FLOPs of a backward pass over those of its forward pass."""


@dataclass(frozen=True, slots=True)
class UpdateFlops:
    """FLOPs of the forward passes of an update."""

    layers: float
    head: float
    """FLOPs of the output head, which is computed only for predicted tokens."""
    repeated: float
    """FLOPs of tokens that a cut computed again, a part of `layers`."""
    attention: float
    """FLOPs of query-key pairs, a part of `layers`."""
    mlp: float
    """FLOPs of a dense model's MLPs, a part of `layers`."""

    @property
    def model_update(self) -> float:
        """FLOPs of forward and backward pass, without tokens that are computed twice."""
        return (1 + BACKWARD) * (self.layers - self.repeated + self.head)

    def hardware_update(self, parallel: ParallelConfig, layers: int) -> float:
        """Return the FLOPs actually computed: with repeated tokens, the second pass over the head's logits, and
        recomputation.

        Masked pairs inside a block of queries, padding, norms and activation functions are not counted.

        Args:
            parallel: what is computed again.
            layers: number of layers of the model.
        """
        again = parallel.recomputed_share(layers) * self.layers
        again += self.attention if parallel.recomputes("core_attn") else 0.0
        again += self.mlp if parallel.recomputes("mlp") else 0.0
        return (1 + BACKWARD) * self.layers + again + (2 + BACKWARD) * self.head


def forward_flops(spec: ModelSpec, tokens: int, pairs: int, targets: int) -> tuple[float, float]:
    """Return the FLOPs of one forward pass: of the layers, and of the output head.

    Args:
        spec: the model; in a mixture the experts that a token visits count.
        tokens: tokens through all layers.
        pairs: query-key pairs under the attention mask.
        targets: predicted tokens.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = spec.hidden * (2 * queries + 2 * keys)
    visited = 1 if spec.experts is None else spec.experts.top_k
    router = 0 if spec.experts is None else spec.hidden * spec.experts.count
    weights = attention + visited * 3 * spec.hidden * spec.ffn + router
    layers = spec.layers * (2.0 * weights * tokens + 4.0 * queries * pairs)
    return layers, 2.0 * spec.hidden * spec.vocabulary * targets


def mlp_flops(spec: ModelSpec, tokens: float) -> float:
    """Return the FLOPs of one forward pass of a dense model's MLPs; 0 for a mixture of experts."""
    return spec.layers * 6.0 * spec.hidden * spec.ffn * tokens if spec.experts is None else 0.0


def update_flops(spec: ModelSpec, packs: Iterable[TreePack]) -> UpdateFlops:
    """Return the FLOPs of one forward pass over packs."""
    layers = head = repeated = attention = mlp = 0.0
    for pack in packs:
        own, predicted = forward_flops(spec, len(pack), pack.attention_pairs, len(pack.predictors))
        # Repeated tokens come first in a pack: a chain of ancestors, each seeing those before it and itself.
        first = pack.position_ids[pack.inherited : pack.inherited + pack.repeated]
        again, _ = forward_flops(spec, pack.repeated, int(first.sum(dtype=np.int64)) + pack.repeated, 0)
        layers, head, repeated = layers + own, head + predicted, repeated + again
        attention += forward_flops(spec, 0, pack.attention_pairs, 0)[0]
        mlp += mlp_flops(spec, len(pack))
    return UpdateFlops(layers, head, repeated, attention, mlp)
