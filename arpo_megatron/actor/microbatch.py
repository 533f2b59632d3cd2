"""A pack as tensors: this rank's tokens, the context of its attention, and the inputs of its loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpo_megatron.actor.attention_plan import plan_attention, share_blocks
from arpo_megatron.actor.context import Inheritance, KeptKeyValues, PackContext, register, release
from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.actor.parallel import device, move
from arpo_megatron.packing.balance import TYPICAL_COST, CostModel
from arpo_megatron.packing.layout import Span, TreePack
from arpo_megatron.tree import Float32Array
from arpo_megatron.utils.heartbeat import beat

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One pack on this rank's device. Context-parallel ranks hold different tokens and targets of the pack."""

    inputs: tuple[Tensor, ...]
    """Arguments of `TreeGPTModel.forward` up to the targets."""
    targets: Tensor
    """int64[m], indices of the pack's targets that are predicted here."""
    positive: Tensor
    """float32[m], credit sum_i w_i max(A_i, 0) of each target."""
    negative: Tensor
    """float32[m], credit sum_i w_i min(A_i, 0) of each target."""
    weight: Tensor
    """float32[m], sum_i w_i of each target."""
    old_logprobs: Tensor | None
    """float32[m] in nats; None if the current policy is the old one."""
    reference_logprobs: Tensor | None
    """float32[m] in nats; None without a reference policy."""


@dataclass(frozen=True, slots=True)
class ContextShard:
    """This rank's position among the context-parallel ranks that share a pack."""

    rank: int = 0
    """Index of this rank."""
    ranks: int = 1
    multiple_of: int = 1
    """Each rank pads its tokens to a multiple of this number."""
    cost: CostModel = TYPICAL_COST
    """Model of the work that balances the ranks; packs and data-parallel ranks use the same."""


class MicroBatches:
    """Make the micro-batches of one pass and hold the keys and values that packs hand down; a context manager.

    Args:
        packs: the whole batch; packs of other data-parallel ranks are never made.
        old_logprobs: float32[m] per pack, or None.
        shard: this rank's share of every pack.
        reference_logprobs: float32[m] per pack, or None.
    """

    def __init__(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        shard: ContextShard = ContextShard(),
        reference_logprobs: Sequence[Float32Array] | None = None,
    ) -> None:
        self._packs = packs
        self._reference = reference_logprobs
        self._old = old_logprobs
        self._shard = shard
        self._kept = _kept_key_values(packs)
        self._handles: dict[int, list[Tensor]] = {}
        self._shares: dict[int, _Local] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for index in list(self._handles):
            self.done(index)

    def done(self, index: int) -> None:
        """Release a pack that is not needed any more, and the keys and values it kept for others."""
        for handle in self._handles.pop(index, ()):
            release(handle)
        self._kept.pop(index, None)
        self._shares.pop(index, None)

    def tokens(self, index: int) -> int:
        """Return the number of this rank's tokens of a pack, padding included."""
        return len(self._share(index).members)

    def make(self, index: int) -> MicroBatch:
        """Make the micro-batch of a pack. Its context stays registered until `done`."""
        beat()
        pack = self._packs[index]
        local = self._share(index)
        plan = (
            flex_plan(pack.subtree_end, local.members[local.members >= 0], device())
            if device().type == "cuda"
            else plan_attention(pack.subtree_end, local.spans)
        )
        multiplicity = np.append(pack.multiplicity, 0)[local.members]
        context = PackContext(
            plan=plan,
            multiplicity=_to_device(multiplicity, torch.float32),
            inheritances=self._inheritances(pack),
            kept=self._kept.get(index),
            routes=_routes(pack, local.members),
            order=local.order if self._shard.ranks > 1 else None,
        )
        handle = register(context)
        self._handles.setdefault(index, []).append(handle)
        predictors, targets = local.targets(pack)
        return MicroBatch(
            inputs=(
                _to_device(np.append(pack.token_ids, 0)[local.members], torch.int64),
                _to_device(np.append(pack.position_ids, 0)[local.members], torch.int64),
                handle,
                _to_device(predictors, torch.int64),
                _to_device(pack.target_ids[targets], torch.int64),
            ),
            targets=_to_device(targets, torch.int64),
            positive=_to_device(pack.positive[targets]),
            negative=_to_device(pack.negative[targets]),
            weight=_to_device(pack.weight[targets]),
            old_logprobs=None if self._old is None else _to_device(self._old[index][targets]),
            reference_logprobs=None if self._reference is None else _to_device(self._reference[index][targets]),
        )

    def _share(self, index: int) -> "_Local":
        if index not in self._shares:
            self._shares[index] = _Local.of(self._packs[index], self._shard)
        return self._shares[index]

    def _inheritances(self, pack: TreePack) -> list[Inheritance]:
        """Group the leading tokens into runs that one earlier pack computed."""
        edges = np.flatnonzero(np.diff(pack.inherited_pack)) + 1
        runs = zip(np.split(pack.inherited_pack, edges), np.split(pack.inherited_index, edges), strict=True)
        found = []
        for sources, indices in runs:
            if len(sources):
                source = int(sources[0])
                own = indices - self._packs[source].inherited
                kept = self._kept[source]
                found.append(Inheritance(kept, torch.searchsorted(kept.positions, _to_device(own, torch.int64))))
        return found


def _kept_key_values(packs: Sequence[TreePack]) -> dict[int, KeptKeyValues]:
    """For each pack that others inherit from, collect the positions of all inherited tokens."""
    taken: dict[int, list[NDArray[np.int32]]] = {}
    for pack in packs:
        for source in np.unique(pack.inherited_pack):
            taken.setdefault(int(source), []).append(pack.inherited_index[pack.inherited_pack == source])
    return {
        source: KeptKeyValues(_to_device(np.unique(np.concatenate(indices)) - packs[source].inherited, torch.int64))
        for source, indices in taken.items()
    }


@dataclass(frozen=True, slots=True)
class _Local:
    """One rank's tokens of a pack."""

    spans: list[Span]
    """The blocks of this rank."""
    members: _Ints
    """int64[q], positions in the pack, then -1 for padding."""
    order: tuple[list[int], list[int]]
    """Sizes of the pieces gathered from all ranks (blocks and padding), and the pieces that make up the pack."""

    @classmethod
    def of(cls, pack: TreePack, shard: ContextShard) -> "_Local":
        shares, counts, length = _divide(pack, shard)
        sizes: list[int] = []
        starts: list[tuple[int, int]] = []  # of each block: where it begins in the pack, and its piece
        for share, count in zip(shares, counts, strict=True):
            for start, stop in share:
                starts.append((start, len(sizes)))
                sizes.append(stop - start)
            sizes.append(length - count)
        spans = shares[shard.rank]
        mine = [np.arange(start, stop) for start, stop in spans]
        members = np.concatenate([*mine, np.full(length - counts[shard.rank], -1)]).astype(np.int64)
        return cls(spans, members, (sizes, [piece for _, piece in sorted(starts)]))

    def targets(self, pack: TreePack) -> tuple[_Ints, _Ints]:
        """Return the local positions that predict, and the indices of the pack's targets they predict."""
        index = np.full(len(pack.token_ids) + 1, -1)
        index[self.members] = np.arange(len(self.members))
        index[-1] = -1  # padding has written here
        local = index[pack.predictors]
        here = np.flatnonzero(local >= 0)
        return local[here], here


def padding_of(pack: TreePack, shard: ContextShard) -> int:
    """Return the number of padding tokens that all ranks together add to a pack."""
    _, counts, length = _divide(pack, shard)
    return length * shard.ranks - sum(counts)


def _divide(pack: TreePack, shard: ContextShard) -> tuple[list[list[Span]], list[int], int]:
    """Return each rank's blocks, each rank's tokens, and the tokens per rank with padding."""
    if shard.ranks == 1 and device().type == "cuda":  # FlexAttention chooses blocks of its own
        shares = [[(pack.inherited, len(pack.subtree_end))]]
    else:
        shares = share_blocks(pack.subtree_end, pack.inherited, shard.ranks, shard.cost)
    counts = [sum(stop - start for start, stop in share) for share in shares]
    multiple = shard.multiple_of
    return shares, counts, max(multiple, -(-max(counts) // multiple) * multiple)


def _routes(pack: TreePack, members: _Ints) -> Tensor | None:
    """Return the routes of the members, -1 for padding; None if the pack has no routes."""
    if not pack.routes.size:
        return None
    padding = np.full_like(pack.routes[:1], -1)
    return _to_device(np.concatenate([pack.routes, padding])[members])


def _to_device(array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
    values = torch.from_numpy(np.ascontiguousarray(array))
    return move(values if dtype is None else values.to(dtype), device())  # converted first: such a copy is pinned
