"""The parameters of this rank, named with the layer and expert numbers of the whole model.

Megatron numbers the layers of a pipeline stage (or of a chunk of the interleaved pipeline) and the experts of a rank
from 0. Every layer knows its number in the whole model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from arpo_megatron.models.mapping import Entry

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")


@dataclass(frozen=True, slots=True)
class LocalParameters:
    """This rank's share of the model."""

    parameters: Mapping[str, Tensor]
    """Parameters by Megatron name, with numbers of the whole model."""
    layers: frozenset[int]
    experts: frozenset[int]
    """Numbers of the local experts, equal in every layer."""

    @classmethod
    def of(cls, chunks: Sequence[nn.Module]) -> Self:
        """Collect the parameters of model chunks, without the wrappers of data parallelism and mixed precision."""
        parameters: dict[str, Tensor] = {}
        layers: set[int] = set()
        experts: set[int] = set()
        for chunk in chunks:
            model: Any = chunk
            while "module" in dict(model.named_children()):
                model = model.module
            layers.update(layer.layer_number - 1 for layer in model.decoder.layers)
            for layer in model.decoder.layers:
                experts.update(getattr(layer.mlp, "local_expert_indices", ()))
            parameters.update((_whole_name(model, name), tensor) for name, tensor in model.named_parameters())
        return cls(parameters, frozenset(layers), frozenset(experts))

    def find(self, entry: Entry) -> tuple[str, Tensor] | None:
        """Return the name and tensor of an entry's parameter; None if other ranks hold it.

        Raises:
            KeyError: the parameter should be local and is not; the model does not fit the spec of the entry.
        """
        for name in entry.megatron:
            if name in self.parameters:
                return name, self.parameters[name]
        if entry.layer in self.layers and (entry.expert is None or entry.expert in self.experts):
            raise KeyError(f"the model has no parameter {' or '.join(entry.megatron)}")
        return None


def _whole_name(model: Any, name: str) -> str:
    if (in_layer := _LAYER.fullmatch(name)) is None:
        return name
    layer, rest = model.decoder.layers[int(in_layer[1])], in_layer[2]
    if (in_expert := _EXPERT.fullmatch(rest)) is not None:
        rest = f"{in_expert[1]}{layer.mlp.local_expert_indices[int(in_expert[2])]}{in_expert[3]}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"
