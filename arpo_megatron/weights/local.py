"""The parts of Hugging Face tensors that this trainer rank holds."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from arpo_megatron.engine.wire.boxes import Box, BoxPart, TensorType, WeightMessage, inside, unpack
from arpo_megatron.engine.wire.checksums import checksum
from arpo_megatron.engine.wire.devices import device_name, host_name
from arpo_megatron.engine.wire.staging import as_bytes
from arpo_megatron.hardware.fp8 import BLOCK
from arpo_megatron.models.mapping import Entry, ShardRule
from arpo_megatron.weights.blockwise import FP8, SCALES, block_scales, quantized, slab_rows
from arpo_megatron.weights.reshard import TrainerShard, boxes_in, tensor_types
from arpo_megatron.weights.shards import LocalParameters


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's parts of the model."""

    shard: TrainerShard
    """Description for the plan."""
    types: Mapping[str, TensorType]
    """All tensors of a push."""
    parts: Mapping[str, Mapping[Box, Tensor]]
    """Views of the parameters, by tensor and by their place in it. Those of tensors that are pushed in FP8, and of
    their scales, are the weights themselves: they are quantized when they are sent."""
    device: torch.device

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], table: Sequence[Entry]) -> Self:
        """Find the parts in this rank's model chunks, wrapped or not.

        Args:
            chunks: the model chunks.
            table: result of `reshard.pushed`.

        Raises:
            ValueError: a parameter does not have the shape that the plan expects.
        """
        local = LocalParameters.of(chunks)
        mp = parallel_state
        tensor = mp.get_tensor_model_parallel_rank(), mp.get_tensor_model_parallel_world_size()
        expert = mp.get_expert_tensor_parallel_rank(), mp.get_expert_tensor_parallel_world_size()
        held: list[int] = []
        parts: dict[str, dict[Box, Tensor]] = {}
        for index, entry in enumerate(table):
            if (found := local.find(entry)) is None:
                continue
            held.append(index)
            rank = tensor if entry.expert is None else expert
            weights = table[index - 1] if next(iter(entry.hf)).endswith(SCALES) else entry
            views = [
                view
                for part in weights.parts(found[1].detach(), rank[1])
                for view in (part if entry.layout is ShardRule.GROUPS else [part])
            ]
            for (name, box), view in zip(boxes_in(entry, rank), views, strict=True):
                of_weights = _weights_of(name, box)
                if tuple(view.shape) != tuple(last - first for first, last in of_weights):
                    raise ValueError(f"{found[0]} has shape {tuple(view.shape)}; the plan expects {name}{list(box)}")
                parts.setdefault(name, {})[box] = view
        one = next(iter(local.parameters.values()))
        shard = TrainerShard(device_name(one.device), host_name(), tensor, expert, tuple(held))
        return cls(shard, tensor_types(table, one.dtype), parts, one.device)

    def view(self, piece: BoxPart) -> Tensor:
        """Return the values of a piece, which lies in one of this rank's parts: a view of it, or FP8 made of it."""
        for box, part in self.parts[piece.name].items():
            if all(first <= a and b <= last for (a, b), (first, last) in zip(piece.box, box, strict=True)):
                return self._values(piece.name, part, box, piece.box)
        raise KeyError(f"this rank does not hold {piece.name}{list(piece.box)}")

    def contiguous(self, message: WeightMessage, device: torch.device) -> Tensor | None:
        """Return the bytes of a message on `device` if it is one piece and needs no copy there; None otherwise."""
        if len(message.pieces) > 1 or device != self.device or self._is_quantized(message.pieces[0].name):
            return None
        view = self.view(message.pieces[0])
        return as_bytes(view) if view.is_contiguous() else None

    def pack(self, message: WeightMessage, flat: Tensor) -> None:
        """Copy the pieces of a message to uint8[message.bytes]."""
        for piece, target in zip(message.pieces, unpack(flat, message.pieces, self.types), strict=True):
            for part, rows in self._slabs(piece):
                target[rows].copy_(self.view(part))

    def checksum(self, name: str, mine: Collection[Box]) -> Tensor:
        """Return the sum over this rank's parts of a tensor in `mine`, as int64[] on its device; the sums of all ranks
        add up modulo 2^64."""
        kind, total = self.types[name], torch.zeros((), dtype=torch.int64, device=self.device)
        whole = kind.meta()
        for box, part in self.parts.get(name, {}).items():
            if box in mine:
                for slab, _ in self._slabs(BoxPart(name, 0, box, 0)):
                    values = self._values(name, part, box, slab.box)
                    total += checksum(values, inside(whole, kind.whole, slab.box))
        return total

    def _slabs(self, piece: BoxPart) -> Iterator[tuple[BoxPart, slice]]:
        """Yield parts of a piece and their rows in it. Quantized parts are small: they exist next to the bucket."""
        (first, last), *others = piece.box
        step = last - first
        if self.types[piece.name].torch_dtype == FP8:
            step = slab_rows(others[0][1] - others[0][0])
        for start in range(first, last, step):
            stop = min(last, start + step)
            yield replace(piece, box=((start, stop), *others)), slice(start - first, stop - first)

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(SCALES) or self.types[name].torch_dtype == FP8

    def _values(self, name: str, part: Tensor, held: Box, box: Box) -> Tensor:
        """Return the values `box` of a tensor, from the part that has its place at `held`."""
        weights = inside(part, _weights_of(name, held), _weights_of(name, box))
        if name.endswith(SCALES):
            return block_scales(weights)
        return quantized(weights) if self.types[name].torch_dtype == FP8 else weights


def _weights_of(name: str, box: Box) -> Box:
    """Return the weights that a box of scales belongs to; any other box as it is."""
    return tuple((a * BLOCK, b * BLOCK) for a, b in box) if name.endswith(SCALES) else box
