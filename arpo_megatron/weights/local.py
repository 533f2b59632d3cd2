"""The parts of Hugging Face tensors that this trainer rank holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from arpo_megatron.engine.wire.boxes import Box, Piece, TensorType, inside
from arpo_megatron.engine.wire.checksums import Sample
from arpo_megatron.engine.wire.devices import device_name, host_name
from arpo_megatron.models.mapping import Layout
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.reshard import TrainerShard, boxes_in, pushed, tensor_types
from arpo_megatron.weights.shards import LocalParameters


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's parts of the model."""

    shard: TrainerShard
    """Description for the plan."""
    types: Mapping[str, TensorType]
    """All tensors of the model."""
    parts: Mapping[str, Mapping[Box, Tensor]]
    """Views of the parameters, by tensor and by their place in it."""
    device: torch.device

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], spec: ModelSpec) -> Self:
        """Find the parts in this rank's model chunks, wrapped or not.

        Raises:
            ValueError: a parameter has not the shape that the plan will expect.
        """
        local = LocalParameters.of(chunks)
        mp = parallel_state
        tensor = mp.get_tensor_model_parallel_rank(), mp.get_tensor_model_parallel_world_size()
        expert = mp.get_expert_tensor_parallel_rank(), mp.get_expert_tensor_parallel_world_size()
        held: list[int] = []
        parts: dict[str, dict[Box, Tensor]] = {}
        for index, entry in enumerate(pushed(spec)):
            if (found := local.find(entry)) is None:
                continue
            held.append(index)
            rank = tensor if entry.expert is None else expert
            views = [
                view
                for part in entry.parts(found[1].detach(), rank[1])
                for view in (part if entry.layout is Layout.GROUPS else [part])
            ]
            for (name, box), view in zip(boxes_in(entry, rank), views, strict=True):
                if tuple(view.shape) != tuple(last - first for first, last in box):
                    raise ValueError(f"{found[0]} holds {tuple(view.shape)} where the plan expects {name}{list(box)}")
                parts.setdefault(name, {})[box] = view
        one = next(iter(local.parameters.values()))
        shard = TrainerShard(device_name(one.device), host_name(), tensor, expert, tuple(held))
        return cls(shard, tensor_types(spec, one.dtype), parts, one.device)

    def view(self, piece: Piece) -> Tensor:
        """Return the values of a piece, which lies in one of this rank's parts."""
        for box, part in self.parts[piece.name].items():
            if all(first <= a and b <= last for (a, b), (first, last) in zip(piece.box, box, strict=True)):
                return inside(part, box, piece.box)
        raise KeyError(f"this rank does not hold {piece.name}{list(piece.box)}")

    def checksum(self, name: str, sample: Sample, mine: Callable[[Box], bool]) -> int:
        """Return the sum over this rank's parts of a sample that are `mine`; sums of all ranks add up modulo 2^64."""
        whole, total = self.types[name].meta(), 0
        for box, part in self.parts.get(name, {}).items():
            if mine(box):
                piece = sample.piece_in(part, inside(whole, self.types[name].whole, box))
                total += 0 if piece is None else piece.checksum
        return total % 2**64
