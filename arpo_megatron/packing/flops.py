"""How much work an update is, and what share of the machine it used.

Model FLOPs are those that the mathematics needs, by the usual count (PaLM, arXiv 2204.02311, appendix B): two a weight
and token in every matrix product, four a head's width, query and key that may see it in attention, and twice as much
again in the backward pass. Tokens are the tree's, so the flattened trajectories' work is not claimed: sharing shows as
less time, not as more FLOP/s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.layout import TreePack

Recompute = Literal["none", "selective", "full"]
BACKWARD = 2.0
"""Work of a backward pass over that of its forward pass."""


@dataclass(frozen=True, slots=True)
class UpdateFlops:
    """FLOPs of forward passes.

    Attributes:
        layers: of the transformer layers.
        head: of the output head, which is computed where a token is predicted.
        repeated: of tokens that a cut computed again, a part of `layers`.
        attention: of query-key pairs, a part of `layers`.
    """

    layers: float
    head: float
    repeated: float
    attention: float

    @property
    def model_update(self) -> float:
        """Forward and backward pass, without what is computed twice."""
        return (1 + BACKWARD) * (self.layers - self.repeated + self.head)

    def hardware_update(self, recompute: Recompute) -> float:
        """What is really computed: with repeated tokens, the head's logits twice, and what recomputation does again.

        Masked pairs inside a block of queries and padding are not in it.
        """
        again = {"none": 0.0, "selective": self.attention, "full": self.layers}[recompute]
        return (1 + BACKWARD) * self.layers + again + (2 + BACKWARD) * self.head


def forward_flops(spec: ModelSpec, tokens: int, pairs: int, targets: int) -> tuple[float, float]:
    """FLOPs of one forward pass: of the layers, and of the output head.

    Args:
        spec: of the model; of a mixture, the experts that a token visits count.
        tokens: through all layers.
        pairs: query-key pairs under the attention mask.
        targets: tokens that are predicted.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = spec.hidden * (2 * queries + 2 * keys)
    visited = 1 if spec.experts is None else spec.experts.top_k
    router = 0 if spec.experts is None else spec.hidden * spec.experts.count
    weights = attention + visited * 3 * spec.hidden * spec.ffn + router
    layers = spec.layers * (2.0 * weights * tokens + 4.0 * queries * pairs)
    return layers, 2.0 * spec.hidden * spec.vocabulary * targets


def update_flops(spec: ModelSpec, packs: Iterable[TreePack]) -> UpdateFlops:
    """Of one forward pass over packs."""
    layers = head = repeated = attention = 0.0
    for pack in packs:
        own, predicted = forward_flops(spec, len(pack), pack.attention_pairs, len(pack.predictors))
        # Repeated tokens come first in a pack: a chain of ancestors, each seeing those before it.
        again, _ = forward_flops(spec, pack.repeated, pack.repeated * (pack.repeated + 1) // 2, 0)
        layers, head, repeated = layers + own, head + predicted, repeated + again
        attention += forward_flops(spec, 0, pack.attention_pairs, 0)[0]
    return UpdateFlops(layers, head, repeated, attention)
