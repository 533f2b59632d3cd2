"""Which parameters this rank holds, under the numbers that layers and experts have in the whole model.

Megatron numbers the layers of a pipeline stage (or of a chunk of the interleaved pipeline) and the experts of a rank
from 0; every layer knows where it stands in the whole.
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
    """This rank's share of the model.

    Attributes:
        parameters: by Megatron name with numbers of the whole model.
        layers: the numbers of its layers.
        experts: the numbers of its experts, in every layer the same.
    """

    parameters: Mapping[str, Tensor]
    layers: frozenset[int]
    experts: frozenset[int]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module]) -> Self:
        """Those of the model chunks of a rank, without the wrappers of data parallelism and mixed precision."""
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
        """The parameter of an entry and the name it goes by here; None where other ranks hold it.

        Raises:
            KeyError: it should be here and is not: the model is not of the shape that the entry was made for.
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
