"""Additions in a random order, as atomics and NCCL may make them on a GPU, so that no check relies on their order.

`pytest --any-order` runs every test so, and the ranks that it starts; `any_order()` does it for a part of one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SEED = 20


class AnyOrder(TorchDispatchMode):
    """Permutes what operations with atomics on CUDA add, and the ranks whose tensors a collective sums."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = np.random.default_rng(_SEED)
        self.collectives: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Operations whose order was changed, by name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch."""
        change = _CHANGES.get(func.overloadpacket.__name__ if func.namespace in ("aten", "c10d") else "")
        found = None if change is None else change(self, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found[0]

    def permuted(self, name: str, length: int) -> Tensor:
        """Return a random order of `length` additions and count it."""
        self.counts[name] += 1
        return torch.from_numpy(self.orders.permutation(length))


def _scatter(mode: AnyOrder, func: Any, target: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Any]:
    order = mode.permuted("scatter_add", index.shape[dim] if index.dim() else 1)
    if not index.dim():
        return (func(target, dim, index, source),)
    used = source[tuple(slice(size) for size in index.shape)]
    return (func(target, dim, index.index_select(dim, order), used.index_select(dim, order)),)


def _index_add(
    mode: AnyOrder, func: Any, target: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any
) -> tuple[Any] | None:
    if not index.dim() or not source.dim():
        return None
    order = mode.permuted("index_add", len(index))
    return (func(target, dim, index[order], source.index_select(dim, order), **options),)


def _index_put(
    mode: AnyOrder,
    func: Any,
    target: Tensor,
    indices: Any,
    values: Tensor,
    accumulate: bool = False,
    *unsafe: bool,
    **named: bool,
) -> tuple[Any] | None:
    """Permute the rows of an accumulation by one list of indices of the first dimension."""
    simple = len(indices) == 1 and indices[0].dim() == 1 and indices[0].dtype == torch.int64
    if not accumulate or not simple or values.dim() != target.dim() or len(values) != len(indices[0]):
        return None
    order = mode.permuted("index_put", len(values))
    return (func(target, [indices[0][order]], values[order], accumulate, *unsafe, **named),)


def _embedding(mode: AnyOrder, func: Any, gradient: Tensor, indices: Tensor, *more: Any) -> tuple[Any]:
    order = mode.permuted("embedding_dense_backward", indices.numel())
    rows = gradient.reshape(indices.numel(), -1)[order]
    return (func(rows, indices.reshape(-1)[order], *more),)


def _all_reduce(mode: AnyOrder, func: Any, tensors: list[Tensor], group: Any, op: Any, *more: Any) -> tuple[Any] | None:
    if not _sums(group, op, tensors[0]):
        return None
    parts = [_gathered(own, group) for own in tensors]
    found = func(tensors, group, op, *more)
    _wait(found)
    for own, theirs in zip(tensors, parts, strict=True):
        own.copy_(_sum(mode, theirs, group))
    return (found,)


def _reduce_scatter(
    mode: AnyOrder, func: Any, output: Any, source: Any, group: Any, op: Any, *more: Any
) -> tuple[Any] | None:
    outputs, sources = ([each] if isinstance(each, Tensor) else each for each in (output, source))
    if not _sums(group, op, sources[0]):
        return None
    members = dist.ProcessGroup.unbox(group)
    parts = [[part.reshape(members.size(), -1)[members.rank()] for part in _gathered(each, group)] for each in sources]
    found = func(output, source, group, op, *more)
    _wait(found)
    for own, theirs in zip(outputs, parts, strict=True):
        own.copy_(_sum(mode, theirs, group).reshape(own.shape))
    return (found,)


def _wait(found: Any) -> None:
    """Wait for a collective, whose operation returns the work alone or after its tensors."""
    dist.Work.unbox(found[-1] if isinstance(found, tuple | list) else found).wait()


def _sums(group: Any, op: Any, tensor: Tensor) -> bool:
    """Whether a collective sums numbers of more than two ranks: the sum of two has one order."""
    return op.op() == dist.ReduceOp.SUM and tensor.is_floating_point() and dist.ProcessGroup.unbox(group).size() > 2


def _gathered(own: Tensor, group: Any) -> list[Tensor]:
    members = dist.ProcessGroup.unbox(group)
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(members.size())]
    dist.all_gather(parts, own.contiguous(), group=members)
    return parts


def _sum(mode: AnyOrder, parts: list[Tensor], group: Any) -> Tensor:
    """Sum the parts in an order that all ranks of the group draw alike, as in an all-reduce of NCCL."""
    name = dist.ProcessGroup.unbox(group).group_name
    mode.collectives[name] += 1
    mode.counts["collective"] += 1
    drawn = np.random.default_rng([_SEED, mode.collectives[name]]).permutation(len(parts))
    total = parts[drawn[0]].clone()
    for index in drawn[1:]:
        total += parts[index]
    return total


_CHANGES: dict[str, Callable[..., tuple[Any] | None]] = {
    "scatter_add": _scatter,
    "scatter_add_": _scatter,
    "index_add": _index_add,
    "index_add_": _index_add,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "embedding_dense_backward": _embedding,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter,
}


@contextmanager
def any_order() -> Iterator[AnyOrder]:
    """Add in random order inside the context."""
    with AnyOrder() as mode:
        yield mode
