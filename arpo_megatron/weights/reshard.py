"""The plan of a push: which trainer rank sends which part of which tensor to which engine rank, and when.

A push is a resharding. Each engine rank receives the intersections of its boxes with the trainer's boxes, and nothing
else. Trainer ranks with equal boxes (data-parallel replicas, and tensor-parallel ranks for undivided tensors) share
the work: the nearest one sends, and among equally near ones the one that has the least to send so far.

The plan is a pure function of both sides' boxes, so every trainer rank computes the same one. It consists of rounds. In
a round, a process handles at most one bucket of bytes; two rounds are in flight, so it holds at most two buckets.

A mixture has some 20,000 tensors, and each engine rank receives a part of nearly all of them. Tensors that are equal in
type and in boxes on both sides are therefore planned as one. They become messages in the two processes that exchange
them.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from arpo_megatron.engine.wire.boxes import (
    AlikeParts,
    Box,
    Boxes,
    EngineShard,
    PlannedSend,
    TensorType,
    intersect,
    padded,
    size,
)
from arpo_megatron.hardware.fp8 import BLOCK
from arpo_megatron.models.mapping import Entry, ShardRule, entries
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.blockwise import FP8, SCALES, with_scales

_NEAR = 3
"""Alike tensors are planned as one if each comes within this many names after the one before it. That is enough for a
layer's experts with their scales, and no tensor has to wait for those of other layers."""

Round = tuple[PlannedSend, ...]


@dataclass(frozen=True, slots=True)
class TrainerShard:
    """The parameters that one trainer rank holds, and its place."""

    device: str
    """See `EngineShard`."""
    host: str
    tensor: tuple[int, int]
    """Index among its tensor-parallel ranks, and their number."""
    expert_tensor: tuple[int, int]
    """The same for experts."""
    entries: tuple[int, ...]
    """Indices of its parameters in the table of a push."""


def pushed(spec: ModelSpec, *, fp8: bool = False) -> list[Entry]:
    """Return the entries whose tensors a push brings, to engines that hold their products in FP8 or as they are."""
    table = [entry for entry in entries(spec) if not entry.copy]
    return with_scales(table) if fp8 else table


def tensor_types(table: Sequence[Entry], dtype: torch.dtype) -> dict[str, TensorType]:
    """Return shape and dtype of every tensor of a push by name.

    Args:
        table: result of `pushed`.
        dtype: number format of the trainer's parameters.
    """
    names = {name for entry in table for name in entry.hf}

    def kind(name: str) -> torch.dtype:
        return torch.float32 if name.endswith(SCALES) else FP8 if name + SCALES in names else dtype

    shapes = {name: shape for entry in table for name, shape in entry.hf.items()}
    return {name: TensorType(shape, str(kind(name)).removeprefix("torch.")) for name, shape in shapes.items()}


def byte_size(kind: TensorType) -> int:
    """Return the bytes of a whole tensor."""
    return size(kind.whole) * kind.torch_dtype.itemsize


def boxes_in(entry: Entry, tensor: tuple[int, int]) -> list[tuple[str, Box]]:
    """Return the boxes of an entry that a tensor-parallel rank holds.

    Each is a contiguous or strided part of its parameter. The interleaved rows of query groups are a box per group.
    """
    rank, ranks = tensor
    found: list[tuple[str, Box]] = []
    for name, shape in entry.hf.items():
        piece = entry.piece(shape, rank, ranks)
        box: Box = tuple(part.indices(n)[:2] for part, n in zip(piece, shape, strict=True))
        if entry.layout is not ShardRule.GROUPS:
            found.append((name, box))
            continue
        (first, last), *others = box
        width = shape[0] // entry.groups
        found += [(name, ((row, row + width), *others)) for row in range(first, last, width)]
    return found


def owners(table: Sequence[Entry], trainers: Sequence[TrainerShard]) -> dict[str, dict[Box, list[int]]]:
    """Return, for each tensor of a push, its boxes on the trainer's side and the ranks that hold each."""
    found: dict[str, dict[Box, list[int]]] = {name: {} for entry in table for name in entry.hf}
    alike: dict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for rank, shard in enumerate(trainers):
        for index in shard.entries:
            tensor = shard.tensor if table[index].expert is None else shard.expert_tensor
            alike[index, tensor].append(rank)
    for (index, tensor), ranks in alike.items():
        for name, box in boxes_in(table[index], tensor):
            found[name].setdefault(box, []).extend(ranks)
    return found


def checksum_ranks(held: Mapping[str, Mapping[Box, Sequence[int]]]) -> dict[str, dict[Box, int]]:
    """Return, for each box, the rank that computes its checksum: of those that hold it, the one with the least to read.

    A rule by index would not share the work: the tensors of a layer repeat with a period that the number of replicas
    may divide.

    Args:
        held: result of `owners`.
    """
    read: dict[int, int] = defaultdict(int)
    found: dict[str, dict[Box, int]] = {}
    for name, boxes in held.items():
        weights = BLOCK**2 if name.endswith(SCALES) else 1  # that are read for one element
        found[name] = {}
        for box, ranks in boxes.items():
            rank = found[name][box] = min(ranks, key=lambda rank: (read[rank], rank))
            read[rank] += size(box) * weights
    return found


def plan_rounds(
    held: Mapping[str, Mapping[Box, Sequence[int]]],
    trainers: Sequence[TrainerShard],
    engines: Sequence[EngineShard],
    types: Mapping[str, TensorType],
    bucket_bytes: int,
    bucket_holders: Sequence[int],
) -> list[Round]:
    """Return the rounds of a push; see the module's text.

    Args:
        held: result of `owners`.
        trainers: by rank.
        engines: the ranks of all engines, one engine after the other.
        types: every tensor of the model.
        bucket_bytes: most bytes that a process handles in a round, unless a single row (of FP8 blocks) has more.
        bucket_holders: for each engine rank the process that holds its bucket: the trainer rank that hands it over, or
            a number of its own beyond the trainer's ranks.

    Raises:
        ValueError: an engine rank holds something that no trainer rank has, or no engine rank holds a part of a tensor.
    """
    queues = _assign(held, trainers, engines, types, bucket_bytes)
    rounds: list[Round] = []
    while any(any(queue.values()) for queue in queues):
        rounds.append(_next_round(queues, bucket_holders, bucket_bytes, turn=len(rounds)))
    return rounds


def _assign(
    held: Mapping[str, Mapping[Box, Sequence[int]]],
    trainers: Sequence[TrainerShard],
    engines: Sequence[EngineShard],
    types: Mapping[str, TensorType],
    bucket_bytes: int,
) -> list[dict[int, deque[AlikeParts]]]:
    """Return, for each engine rank, the parts that each trainer rank sends to it. Raises ValueError: `plan_rounds`."""
    queues: list[dict[int, deque[AlikeParts]]] = [{} for _ in engines]
    sent = [0] * len(trainers)

    @cache
    def nearest(ranks: tuple[int, ...], device: str, host: str) -> list[int]:
        distances = [_distance(trainers[rank], device, host) for rank in ranks]
        least = min(distances)
        return [rank for rank, distance in zip(ranks, distances, strict=True) if distance == least]

    layouts = {id(engine.boxes): engine.boxes for engine in engines}
    for names in _alike(held, list(layouts.values()), types):
        name, kind = names[0], types[names[0]]
        if (covered := _union({box for boxes in layouts.values() for box in boxes.get(name, ())})) != size(kind.whole):
            raise ValueError(f"the engines hold {covered} of the {size(kind.whole)} elements of {name}")
        parts = {key: list(_parts(names, boxes, held, kind, bucket_bytes)) for key, boxes in layouts.items()}
        for receiver, engine in enumerate(engines):
            for ranks, pieces in parts[id(engine.boxes)]:
                sender = min(nearest(ranks, engine.device, engine.host), key=lambda rank: (sent[rank], rank))
                sent[sender] += sum(piece.bytes for piece in pieces) * len(names)
                queues[receiver].setdefault(sender, deque()).extend(pieces)
    return queues


def _alike(
    held: Mapping[str, Mapping[Box, Sequence[int]]], layouts: Sequence[Boxes], types: Mapping[str, TensorType]
) -> list[tuple[str, ...]]:
    """Return the tensors in groups, within which type, owners and boxes on every engine rank are equal."""
    groups: list[list[str]] = []
    latest: dict[Any, tuple[int, list[str]]] = {}
    for index, (name, kind) in enumerate(types.items()):
        owned = tuple((box, tuple(ranks)) for box, ranks in held[name].items())
        key = kind, owned, tuple(tuple(boxes.get(name, ())) for boxes in layouts)
        at, group = latest.get(key, (-1, []))
        if not group or index - at > _NEAR:
            group = []
            groups.append(group)
        group.append(name)
        latest[key] = index, group
    return [tuple(group) for group in groups]


def _parts(
    names: tuple[str, ...],
    boxes: Boxes,
    held: Mapping[str, Mapping[Box, Sequence[int]]],
    kind: TensorType,
    bucket_bytes: int,
) -> Iterator[tuple[tuple[int, ...], list[AlikeParts]]]:
    """Yield what an engine rank with these boxes receives of alike tensors, and the trainer ranks that have it.

    Raises:
        ValueError: no trainer rank has a part of it.
    """
    for at, box in enumerate(boxes.get(names[0], ())):
        found = 0
        for own, ranks in held[names[0]].items():
            if (common := intersect(box, own)) is not None:
                found += size(common)
                yield tuple(ranks), list(_pieces(names, at, common, kind, bucket_bytes))
        if found != size(box):
            raise ValueError(f"the trainer holds {found} of the {size(box)} elements of {names[0]}{list(box)}")


def _next_round(
    queues: list[dict[int, deque[AlikeParts]]], bucket_holders: Sequence[int], bucket_bytes: int, turn: int
) -> Round:
    """Take as many parts as every process may handle in one round."""
    handled: dict[int, int] = defaultdict(int)
    sends: list[PlannedSend] = []

    def fitting(process: int, count: int) -> int:
        return max((bucket_bytes - handled[process]) // count, 0 if handled[process] else 1)

    for receiver, queue in enumerate(queues):
        senders = sorted(queue)
        first = (receiver + turn) % len(senders) if senders else 0
        for sender in (*senders[first:], *senders[:first]):  # receivers start at different senders
            taken: list[AlikeParts] = []
            processes = {sender, bucket_holders[receiver]}
            while queue[sender]:
                count = padded(queue[sender][0].bytes)
                fits = min(fitting(process, count) for process in processes)
                if not fits:
                    break
                parts, others = queue[sender].popleft().divided(fits)
                if others.names:
                    queue[sender].appendleft(others)
                for process in processes:
                    handled[process] += count * len(parts.names)
                taken.append(parts)
            if taken:
                sends.append(PlannedSend(sender, receiver, tuple(taken)))
    return tuple(sends)


def _pieces(names: tuple[str, ...], at: int, box: Box, kind: TensorType, limit: int) -> Iterator[AlikeParts]:
    """Divide a box into pieces of at most `limit` bytes: some rows, in FP8 with whole blocks."""
    (first, last), *others = box
    row = size(tuple(others)) * kind.torch_dtype.itemsize
    unit = BLOCK if kind.torch_dtype == FP8 else 1
    step = max(1, limit // (unit * row)) * unit
    for start in range(first, last, step):
        stop = min(last, start + step)
        yield AlikeParts(names, at, ((start, stop), *others), (stop - start) * row)


def _distance(trainer: TrainerShard, device: str, host: str) -> int:
    return 0 if trainer.device == device else 1 if trainer.host == host else 2


def _union(boxes: set[Box]) -> int:
    """Return the number of elements in the union of boxes, no three of which have an element in common."""
    total, seen = 0, list[Box]()
    for box in sorted(boxes):
        total += size(box) - sum(size(common) for other in seen if (common := intersect(box, other)) is not None)
        seen.append(box)
    return total
