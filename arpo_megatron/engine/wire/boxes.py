"""Parts of tensors, and the messages in which they travel from trainer ranks to engine ranks.

Both sides describe what they hold as boxes of Hugging Face tensors. A box has one range per dimension, so every
division by rows or columns is a box, whatever the parameter is fused with.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""First and one-past-the-last index in each dimension of a whole tensor."""

LAYOUT_ACTION = "arpo-layout:"
"""Prefix of the action with which SGLang's weight checker is asked what each rank holds; JSON follows."""
PLAN_ACTION = "arpo-plan:"
"""Prefix of the action that gives each rank the rounds in which it receives; JSON follows."""
JOIN_ACTION = "arpo-join:"
"""Prefix of the action with which each rank connects to the trainer; JSON follows."""
EXCHANGE_FORMAT = "arpo-exchange:"
"""Prefix of the `load_format` of the request that starts an exchange; JSON follows."""

ALONE_BYTES = 2**18
"""A piece of at least this size travels alone, so that no side must copy it if it is contiguous there. Smaller ones
share a message: copying them takes less time than sending many messages."""

_ALIGNMENT = 16


def size(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(last - first for first, last in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes of one tensor; None if it is empty."""
    ranges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return ranges if all(first < last for first, last in ranges) else None


def inside(values: Tensor, held: Box, box: Box) -> Tensor:
    """Return the part `box` of `values`, which are the part `held` of a tensor."""
    return values[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, held, strict=True))]


def box_of(view: Tensor, whole: Sequence[int]) -> Box | None:
    """Return the place of a view of a contiguous tensor of shape `whole`; None if it is not a box (transposed)."""
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    if view.dim() != len(whole):
        return None
    if any(n > 1 and have != want for n, have, want in zip(view.shape, view.stride(), strides, strict=True)):
        return None
    left, ranges = int(view.storage_offset()), []
    for n, stride in zip(view.shape, strides, strict=True):
        first, left = divmod(left, stride)
        ranges.append((first, first + n))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and number format of a Hugging Face tensor, as it travels."""

    shape: tuple[int, ...]
    dtype: str
    """Name in torch, such as "bfloat16"."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as an object of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def whole(self) -> Box:
        """The box that holds all elements of the tensor."""
        return tuple((0, n) for n in self.shape)

    def meta(self) -> Tensor:
        """Return a tensor of this type without memory."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    def as_json(self) -> list[Any]:
        """Return the fields as JSON-safe values."""
        return [self.shape, self.dtype]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Return the object whose `as_json` gave `data`."""
        shape, dtype = data
        return cls(tuple(shape), dtype)


Boxes = Mapping[str, Sequence[Box]]
"""The parts of each tensor that one rank of an engine holds. Several may be equal, if the rank keeps copies."""


@dataclass(frozen=True, slots=True)
class EngineShard:
    """The parts of tensors that one rank of an engine holds, and its place."""

    device: str
    """The result of `devices.device_name`: equal in two processes if they can share memory of the device."""
    host: str
    """The result of `devices.host_name`."""
    boxes: Boxes
    """Equal ranks of an engine's replicas share one object, so that a plan is made once for all of them."""


def boxes_from_json(text: str) -> Boxes:
    """Return the boxes whose JSON is `text`."""
    return {name: [tuple((a, b) for a, b in box) for box in of_name] for name, of_name in json.loads(text).items()}


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A part of a tensor on its way into one of the receiver's boxes."""

    name: str
    at: int
    """Index of the receiver's box among its boxes of this tensor."""
    box: Box
    bytes: int


@dataclass(frozen=True, slots=True)
class WeightMessage:
    """Pieces that travel together from a trainer rank to an engine rank."""

    sender: int
    """Trainer rank."""
    receiver: int
    """Index of the engine rank among the ranks of all engines."""
    pieces: tuple[BoxPart, ...]

    @property
    def bytes(self) -> int:
        """Size of the buffer that `unpack` divides."""
        return sum(padded(piece.bytes) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class AlikeParts:
    """Parts of several tensors that are equal in all but the tensor, such as those of a layer's experts."""

    names: tuple[str, ...]
    """Names of the tensors."""
    at: int
    """See `BoxPart`."""
    box: Box
    bytes: int
    """Size of one part."""

    def divided(self, count: int) -> tuple[Self, Self]:
        """Return the first `count` parts, and the others."""
        return replace(self, names=self.names[:count]), replace(self, names=self.names[count:])


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """All that a trainer rank sends to an engine rank in one round."""

    sender: int
    """See `WeightMessage`."""
    receiver: int
    parts: tuple[AlikeParts, ...]

    def messages(self) -> list[WeightMessage]:
        """Return the messages in which it travels, in their order."""
        pieces = [BoxPart(name, each.at, each.box, each.bytes) for each in self.parts for name in each.names]
        small = tuple(piece for piece in pieces if piece.bytes < ALONE_BYTES)
        found = [(piece,) for piece in pieces if piece.bytes >= ALONE_BYTES]
        return [WeightMessage(self.sender, self.receiver, each) for each in (*found, *([small] if small else []))]

    def as_json(self) -> list[Any]:
        """Return the fields as JSON-safe values."""
        return [self.sender, self.receiver, [(each.names, each.at, each.box, each.bytes) for each in self.parts]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Return the object whose `as_json` gave `data`."""
        sender, receiver, parts = data
        return cls(
            sender,
            receiver,
            tuple(
                AlikeParts(tuple(names), at, tuple((a, b) for a, b in box), count) for names, at, box, count in parts
            ),
        )


def unpack(flat: Tensor, pieces: Sequence[BoxPart], types: Mapping[str, TensorType]) -> list[Tensor]:
    """Return the values of each piece as views of uint8[n], which holds them one after the other."""
    found, start = [], 0
    for piece in pieces:
        part = flat[start : start + piece.bytes]
        shape = [last - first for first, last in piece.box]
        found.append(part.view(types[piece.name].torch_dtype).view(shape))
        start += padded(piece.bytes)
    return found


def padded(count: int) -> int:
    """Return the bytes that `count` bytes take in a buffer; torch views only aligned bytes as another type."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
