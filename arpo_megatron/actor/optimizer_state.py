"""The optimizer's state in the shapes of the model's weights, whichever of Megatron's optimizers holds it.

Megatron gives each of its optimizers a checkpoint form of its own, and that of the distributed optimizer gathers all
moments on one rank or fixes the layout. Here there is one form: of every weight KEY the moments `optimizer.exp_avg.KEY`
and `optimizer.exp_avg_sq.KEY` and, where the weight is not float32, the master copy `optimizer.master.KEY`, laid out as
the weight is. The distributed optimizer holds flat stretches of weights; a stretch is written as the few boxes that
make it up (`boxes`), so every rank writes and reads its own part, and any layout can read what any other wrote.

The tensors of the template are the optimizer's own: loading fills them in place. Nothing passes through the
optimizers' `load_state_dict`, which in torch's AdamW under the distributed optimizer leaves all parameters with one
shared `step` tensor, and which forgets `step` in Megatron's reshardable form.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Holding:
    """What this rank's optimizer holds of one weight.

    Attributes:
        weight: the model's parameter.
        tensors: by name, the optimizer's own tensors, in the weight's shape or flat.
        span: the stretch of the flattened weight that they are of; None: all of it.
    """

    weight: Tensor
    tensors: Mapping[str, Tensor]
    span: tuple[int, int] | None


def template(optimizer: Any, weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sharded tensors to save or load the optimizer's state through, and the tensors that they must end up in.

    Args:
        optimizer: Megatron's, with its state in place (`optimizer.complete_state`).
        weights: `sharded_state_dict` of the chunks it trains, by any names.

    Raises:
        ValueError: a weight of the optimizer is not among `weights`.
    """
    shardings = {id(base.data): base for base in weights.values() if isinstance(getattr(base, "data", None), Tensor)}
    sharded: dict[str, Any] = {}
    own: dict[str, Tensor] = {}
    for holding in holdings(optimizer):
        base = shardings.get(id(holding.weight))
        if base is None:
            raise ValueError(f"a weight of shape {tuple(holding.weight.shape)} is optimized but not saved")
        for name, tensor in holding.tensors.items():
            prefix = f"optimizer.{name}"
            if holding.span is None:
                label = str(len(own))
                sharded[label], own[label] = make_sharded_optimizer_tensor(base, tensor.detach(), prefix), tensor
                continue
            for part in _stretch(base, tensor.detach().view(-1), *holding.span, prefix):
                label = str(len(own))
                sharded[label], own[label] = part, part.data
    return sharded, own


def holdings(optimizer: Any) -> Iterator[Holding]:
    """What each of the chained optimizers holds, weight by weight."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:  # no parameters of this kind on this rank
            continue
        if isinstance(part, DistributedOptimizer):
            for weight in part.model_param_group_index_map:
                span = part._get_model_param_range_map(weight)["param"]
                # The master is the weight itself where that is float32.
                names = MOMENTS if weight.dtype == torch.float32 else ("param", *MOMENTS)
                found = part._get_main_param_and_optimizer_states(weight)
                yield Holding(
                    weight, {"master" if n == "param" else n: found[n] for n in names}, (span.start, span.end)
                )
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for weight, master in ((w, m) for halves, masters in pairs for w, m in zip(halves, masters, strict=True)):
                yield Holding(weight, {"master": master, **_moments(inner.state[master])}, None)
            for weight in (w for group in part.fp32_from_fp32_groups for w in group):
                yield Holding(weight, _moments(inner.state[weight]), None)
        else:
            for weight in part.get_parameters():
                yield Holding(weight, _moments(inner.state[weight]), None)


def steps(optimizer: Any) -> int:
    """Updates that Adam has made (skipped ones are not among them); its bias correction depends on it."""
    found = [0]
    for inner in inner_optimizers(optimizer):
        found += [int(state["step"]) for state in inner.state.values() if "step" in state]
        found += [int(group["step"]) for group in inner.param_groups if "step" in group]
    return max(found)


def set_steps(optimizer: Any, count: int) -> None:
    """Every parameter gets a number of its own: torch's AdamW counts them up in place, one by one."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for state in inner.state.values():
                state["step"] = torch.full_like(state["step"], float(count))
        else:  # the fused ones count by group
            for group in inner.param_groups:
                group["step"] = count


def settle(optimizer: Any) -> None:
    """After a load in place: the offloading optimizer hands what it was given to the two optimizers inside it."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch, Transformer Engine or apex optimizers that do the arithmetic."""
    found: list[Any] = []
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is not None:
            found += inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]
    return found


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that tile the stretch [start, end) of a flattened array of `shape`, in its order, as (offset, size).

    Each is contiguous in the flattened array: whole rows at most once a dimension, and the partial ones around them.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in boxes(shape[1:], start, end):
        yield (row, *offset), (1, *size)


def _stretch(base: Any, flat: Tensor, start: int, end: int, prefix: str) -> Iterator[ShardedTensor]:
    """The stretch [start, end) of a weight, whose values are `flat`, as sharded tensors with irregular bounds."""
    for shard, begin in _regular_parts(base):
        # An expert's weight is a row of a tensor with one more axis, which its own shape does not show.
        shape = (*[1] * shard.prepend_axis_num, *shard.local_shape)
        low, high = max(start, begin), min(end, begin + prod(shape))
        place = low - start
        for offset, size in boxes(shape, low - begin, high - begin):
            data = flat[place : place + prod(size)].view(size)
            place += prod(size)
            yield ShardedTensor(
                key=f"{prefix}.{shard.key}",
                data=data,
                dtype=data.dtype,
                local_shape=size,
                global_shape=shard.global_shape,
                global_offset=tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True)),
                axis_fragmentations=None,
                # Data-parallel ranks hold different stretches, not copies of one.
                replica_id=(*shard.replica_id[:2], 0),
            )


def _regular_parts(base: Any) -> Iterator[tuple[ShardedTensor, int]]:
    """The sharded tensors of a weight and where each begins in the flattened weight."""
    if isinstance(base, ShardedTensor):
        yield base, 0
        return
    if not isinstance(base, ShardedTensorFactory):
        raise ValueError(f"a weight is saved as {type(base).__name__}, which the distributed optimizer cannot divide")
    hollow = replace(base, data=torch.empty_like(base.data, device="meta"))
    for part in hollow.build():
        if not part.data.is_contiguous():
            raise ValueError(f"{part.key}: not a contiguous part of its weight")
        yield part, part.data.storage_offset()


def _moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name in MOMENTS}
