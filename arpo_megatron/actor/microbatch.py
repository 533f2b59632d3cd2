"""A pack as tensors: this rank's tokens of it, the context of its attention, and what its loss needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpo_megatron.actor.attention_plan import plan_attention, share_blocks
from arpo_megatron.actor.context import Inheritance, Legacy, PackContext, register, release
from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.actor.parallel import device
from arpo_megatron.packing.balance import TYPICAL_COST, CostModel
from arpo_megatron.packing.layout import Span, TreePack
from arpo_megatron.tree import Float32Array

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One pack on this rank's device. Context-parallel ranks hold different tokens and targets of it.

    Attributes:
        inputs: arguments of `TreeGPTModel.forward` up to the targets.
        targets: int64[m], which of the pack's targets are predicted here.
        positive: float32[m], like the next two from the pack.
        negative: float32[m].
        weight: float32[m].
        old_logprobs: float32[m] in nats, None where the present policy is the old one.
        reference_logprobs: float32[m] in nats, None without a reference policy.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    positive: Tensor
    negative: Tensor
    weight: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class ContextShard:
    """This rank among those that share a pack.

    Attributes:
        rank: context-parallel rank.
        ranks: context-parallel ranks.
        multiple_of: the tokens of a rank are padded to a multiple of this.
        cost: balances the ranks; the same model of work that balances packs and data-parallel ranks.
    """

    rank: int = 0
    ranks: int = 1
    multiple_of: int = 1
    cost: CostModel = TYPICAL_COST


class MicroBatches:
    """Makes the micro-batches of one pass over packs, and keeps what they hand down to each other; a context manager.

    Args:
        packs: of the whole minibatch; those of other data-parallel ranks are never asked for.
        old_logprobs: one array a pack, or None.
        shard: of this rank.
        reference_logprobs: one array a pack, or None.
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
        self._legacies = _legacies(packs)
        self._handles: dict[int, list[Tensor]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for index in list(self._handles):
            self.done(index)

    def done(self, index: int) -> None:
        """Forget a pack that nothing will be asked of any more, and what it kept for others."""
        for handle in self._handles.pop(index, ()):
            release(handle)
        self._legacies.pop(index, None)

    def make(self, index: int) -> MicroBatch:
        """The micro-batch of a pack; its context is found by its handle until it is done."""
        pack = self._packs[index]
        local = _Local.of(pack, self._shard)
        plan = (
            flex_plan(pack.subtree_end, local.members[local.members >= 0], device())
            if device().type == "cuda"
            else plan_attention(pack.subtree_end, local.spans)
        )
        multiplicity = np.append(pack.multiplicity, 0)[local.members]
        context = PackContext(
            plan=plan,
            multiplicity=_put(multiplicity, torch.float32),
            inheritances=self._inheritances(pack),
            legacy=self._legacies.get(index),
            routes=_routes(pack, local.members),
            order=local.order if self._shard.ranks > 1 else None,
        )
        handle = register(context)
        self._handles.setdefault(index, []).append(handle)
        predictors, targets = local.targets(pack)
        return MicroBatch(
            inputs=(
                _put(np.append(pack.token_ids, 0)[local.members], torch.int64),
                _put(np.append(pack.position_ids, 0)[local.members], torch.int64),
                handle,
                _put(predictors, torch.int64),
                _put(pack.target_ids[targets], torch.int64),
            ),
            targets=_put(targets, torch.int64),
            positive=_put(pack.positive[targets]),
            negative=_put(pack.negative[targets]),
            weight=_put(pack.weight[targets]),
            old_logprobs=None if self._old is None else _put(self._old[index][targets]),
            reference_logprobs=None if self._reference is None else _put(self._reference[index][targets]),
        )

    def _inheritances(self, pack: TreePack) -> list[Inheritance]:
        """Runs of leading tokens that one earlier pack computed."""
        edges = np.flatnonzero(np.diff(pack.inherited_pack)) + 1
        runs = zip(np.split(pack.inherited_pack, edges), np.split(pack.inherited_index, edges), strict=True)
        found = []
        for sources, places in runs:
            if len(sources):
                legacy = self._legacies[int(sources[0])]
                own = places - self._packs[int(sources[0])].inherited
                found.append(Inheritance(legacy, torch.searchsorted(legacy.places, _put(own, torch.int64))))
        return found


def _legacies(packs: Sequence[TreePack]) -> dict[int, Legacy]:
    """For each pack that others inherit from, the places of all tokens that any of them takes."""
    taken: dict[int, list[NDArray[np.int32]]] = {}
    for pack in packs:
        for source in np.unique(pack.inherited_pack):
            taken.setdefault(int(source), []).append(pack.inherited_index[pack.inherited_pack == source])
    return {
        source: Legacy(_put(np.unique(np.concatenate(places)) - packs[source].inherited, torch.int64))
        for source, places in taken.items()
    }


@dataclass(frozen=True, slots=True)
class _Local:
    """One rank's tokens of a pack.

    Attributes:
        spans: its blocks.
        members: int64[q], their positions in the pack, then padding (-1).
        order: of all ranks' gathered tokens: sizes of the pieces (blocks and padding), and those that make up the pack.
    """

    spans: list[Span]
    members: _Ints
    order: tuple[list[int], list[int]]

    @classmethod
    def of(cls, pack: TreePack, shard: ContextShard) -> "_Local":
        shares, counts, length = _divided(pack, shard)
        sizes: list[int] = []
        starts: list[tuple[int, int]] = []  # of each block: where it begins in the pack, and its piece
        for share, held in zip(shares, counts, strict=True):
            for start, stop in share:
                starts.append((start, len(sizes)))
                sizes.append(stop - start)
            sizes.append(length - held)
        spans = shares[shard.rank]
        mine = [np.arange(start, stop) for start, stop in spans]
        members = np.concatenate([*mine, np.full(length - counts[shard.rank], -1)]).astype(np.int64)
        return cls(spans, members, (sizes, [piece for _, piece in sorted(starts)]))

    def targets(self, pack: TreePack) -> tuple[_Ints, _Ints]:
        """Local positions that predict, and which of the pack's targets those are."""
        where = np.full(len(pack.token_ids) + 1, -1)
        where[self.members] = np.arange(len(self.members))
        where[-1] = -1  # written by padding
        local = where[pack.predictors]
        here = np.flatnonzero(local >= 0)
        return local[here], here


def padding_of(pack: TreePack, shard: ContextShard) -> int:
    """Tokens of padding that the ranks of a pack add to it."""
    _, counts, length = _divided(pack, shard)
    return length * shard.ranks - sum(counts)


def _divided(pack: TreePack, shard: ContextShard) -> tuple[list[list[Span]], list[int], int]:
    """The blocks of each rank, its tokens, and the tokens of every rank with padding."""
    shares = share_blocks(pack.subtree_end, pack.inherited, shard.ranks, shard.cost)
    counts = [sum(stop - start for start, stop in share) for share in shares]
    multiple = shard.multiple_of
    return shares, counts, max(multiple, -(-max(counts) // multiple) * multiple)


def _routes(pack: TreePack, members: _Ints) -> Tensor | None:
    """Those of the members, -1 for padding; None without any."""
    if not pack.routes.size:
        return None
    nowhere = np.full_like(pack.routes[:1], -1)
    return _put(np.concatenate([pack.routes, nowhere])[members])


def _put(array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device(), dtype)
