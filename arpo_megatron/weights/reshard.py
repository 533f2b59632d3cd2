"""The plan of a push: which trainer rank sends which part of which tensor to which engine rank, and when.

A push is a resharding. Each engine rank receives the intersections of its boxes with the trainer's boxes, and nothing
else. Trainer ranks with equal boxes (data-parallel replicas, and tensor-parallel ranks for undivided tensors) share
the work: the nearest one sends, and among equally near ones the one that has the least to send so far.

The plan is a pure function of both sides' boxes, so every trainer rank computes the same one. It consists of rounds. In
a round, a process handles at most one bucket of bytes; two rounds are in flight, so it holds at most two buckets.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from arpo_megatron.engine.wire.boxes import Box, BoxPart, EngineShard, TensorType, WeightMessage, intersect, size
from arpo_megatron.models.mapping import Entry, ShardRule, entries
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.blockwise import BLOCK, FP8, SCALES, with_scales

ALONE_BYTES = 2**18
"""A piece of at least this size travels alone, so that no side must copy it if it is contiguous there. Smaller ones
share a message: copying them takes less time than sending many messages."""

Round = tuple[WeightMessage, ...]


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
) -> list[dict[int, deque[BoxPart]]]:
    """Return, for each engine rank, the pieces that each trainer rank sends to it. Raises ValueError: `plan_rounds`."""
    queues: list[dict[int, deque[BoxPart]]] = [{} for _ in engines]
    sent = [0] * len(trainers)
    for name, kind in types.items():
        distinct: set[Box] = set()
        for receiver, engine in enumerate(engines):
            for at, box in enumerate(engine.boxes.get(name, ())):
                distinct.add(box)
                found = 0
                for own, ranks in held[name].items():
                    if (common := intersect(box, own)) is None:
                        continue
                    found += size(common)
                    sender = min(ranks, key=lambda rank: (_distance(trainers[rank], engine), sent[rank], rank))
                    pieces = list(_pieces(name, at, common, kind, bucket_bytes))
                    sent[sender] += sum(piece.bytes for piece in pieces)
                    queues[receiver].setdefault(sender, deque()).extend(pieces)
                if found != size(box):
                    raise ValueError(f"the trainer holds {found} of the {size(box)} elements of {name}{list(box)}")
        if (covered := _union(distinct)) != size(kind.whole):
            raise ValueError(f"the engines hold {covered} of the {size(kind.whole)} elements of {name}")
    return queues


def _next_round(
    queues: list[dict[int, deque[BoxPart]]], bucket_holders: Sequence[int], bucket_bytes: int, turn: int
) -> Round:
    """Take as many pieces as every process may handle in one round."""
    handled: dict[int, int] = defaultdict(int)
    messages: list[WeightMessage] = []
    for receiver, queue in enumerate(queues):
        senders = sorted(queue)
        first = (receiver + turn) % len(senders) if senders else 0
        for sender in (*senders[first:], *senders[:first]):  # receivers start at different senders
            taken: list[BoxPart] = []
            processes = {sender, bucket_holders[receiver]}
            while queue[sender]:
                count = WeightMessage(sender, receiver, (queue[sender][0],)).bytes
                if any(handled[process] and handled[process] + count > bucket_bytes for process in processes):
                    break
                for process in processes:
                    handled[process] += count
                taken.append(queue[sender].popleft())
            alone = [piece for piece in taken if piece.bytes >= ALONE_BYTES]
            together = tuple(piece for piece in taken if piece.bytes < ALONE_BYTES)
            messages += [WeightMessage(sender, receiver, (piece,)) for piece in alone]
            messages += [WeightMessage(sender, receiver, together)] if together else []
    return tuple(messages)


def _pieces(name: str, at: int, box: Box, kind: TensorType, limit: int) -> Iterator[BoxPart]:
    """Divide a box into pieces of at most `limit` bytes: some rows, in FP8 with whole blocks."""
    (first, last), *others = box
    row = size(tuple(others)) * kind.torch_dtype.itemsize
    unit = BLOCK if kind.torch_dtype == FP8 else 1
    step = max(1, limit // (unit * row)) * unit
    for start in range(first, last, step):
        stop = min(last, start + step)
        yield BoxPart(name, at, ((start, stop), *others), (stop - start) * row)


def _distance(trainer: TrainerShard, engine: EngineShard) -> int:
    return 0 if trainer.device == engine.device else 1 if trainer.host == engine.host else 2


def _union(boxes: set[Box]) -> int:
    """Return the number of elements in the union of boxes that are equal in all but one dimension or disjoint."""
    total, seen = 0, list[Box]()
    for box in sorted(boxes):
        total += size(box) - sum(size(common) for other in seen if (common := intersect(box, other)) is not None)
        seen.append(box)
    return total
