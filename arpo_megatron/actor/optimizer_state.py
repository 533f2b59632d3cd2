"""The optimizer's state in the shapes of the model's weights, for every optimizer of Megatron.

Megatron's optimizers each have a checkpoint format; that of the distributed optimizer gathers all moments on one rank
or fixes the layout. Here there is one format. For a weight KEY it has the moments `optimizer.exp_avg.KEY` and
`optimizer.exp_avg_sq.KEY` and, unless the weight is float32, the master copy `optimizer.master.KEY`, all divided as the
weight is. The distributed optimizer owns flat ranges of weights; a range is written as the few boxes that tile it
(`split_into_boxes`). Each rank writes and reads its own part, and any layout can read the files of any other.

The template holds the optimizer's own tensors, so loading fills them in place. Nothing passes through
`load_state_dict` of the optimizers: under the distributed optimizer, torch's AdamW would leave all parameters with one
shared `step` tensor, and Megatron's reshardable format loses `step`.
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
class WeightState:
    """The optimizer's state of one weight on this rank."""

    weight: Tensor
    """The model's parameter."""
    tensors: Mapping[str, Tensor]
    """The optimizer's own tensors by name, flat or in the weight's shape."""
    span: tuple[int, int] | None
    """Range [start, end) of the flattened weight that the tensors cover; None covers all of it."""


def state_template(optimizer: Any, weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Describe the optimizer's state as sharded tensors for saving or loading.

    Args:
        optimizer: Megatron's, with complete state (`optimizer.complete_state`).
        weights: `sharded_state_dict` of the chunks it trains, by any names.

    Returns:
        The sharded tensors, and under the same names the optimizer's tensors that loaded values must be copied into.

    Raises:
        ValueError: a weight of the optimizer is not among `weights`.
    """
    shardings = {id(base.data): base for base in weights.values() if isinstance(getattr(base, "data", None), Tensor)}
    sharded: dict[str, Any] = {}
    own: dict[str, Tensor] = {}
    for state in weight_states(optimizer):
        base = shardings.get(id(state.weight))
        if base is None:
            raise ValueError(f"a weight of shape {tuple(state.weight.shape)} is optimized but not saved")
        for name, tensor in state.tensors.items():
            prefix = f"optimizer.{name}"
            if state.span is None:
                label = str(len(own))
                sharded[label], own[label] = make_sharded_optimizer_tensor(base, tensor.detach(), prefix), tensor
                continue
            for part in _shard_range(base, tensor.detach().view(-1), *state.span, prefix):
                label = str(len(own))
                sharded[label], own[label] = part, part.data
    return sharded, own


def weight_states(optimizer: Any) -> Iterator[WeightState]:
    """Yield the state of each weight in each of the chained optimizers."""
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
                yield WeightState(
                    weight, {"master" if n == "param" else n: found[n] for n in names}, (span.start, span.end)
                )
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for weight, master in ((w, m) for halves, masters in pairs for w, m in zip(halves, masters, strict=True)):
                yield WeightState(weight, {"master": master, **_moments(inner.state[master])}, None)
            for weight in (w for group in part.fp32_from_fp32_groups for w in group):
                yield WeightState(weight, _moments(inner.state[weight]), None)
        else:
            for weight in part.get_parameters():
                yield WeightState(weight, _moments(inner.state[weight]), None)


def adam_steps(optimizer: Any) -> int:
    """Return the number of updates Adam has made, without skipped ones; its bias correction depends on it."""
    found = [0]
    for inner in inner_optimizers(optimizer):
        found += [int(state["step"]) for state in inner.state.values() if "step" in state]
        found += [int(group["step"]) for group in inner.param_groups if "step" in group]
    return max(found)


def set_adam_steps(optimizer: Any, count: int) -> None:
    """Set Adam's number of updates. torch's AdamW gets one tensor per parameter because it increments them in place."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for state in inner.state.values():
                state["step"] = torch.full_like(state["step"], float(count))
        else:  # the fused ones count by group
            for group in inner.param_groups:
                group["step"] = count


def sync_offloaded_state(optimizer: Any) -> None:
    """After a load in place, copy the state of an offloading optimizer to the two optimizers inside it."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch, Transformer Engine or apex optimizers that do the arithmetic."""
    found: list[Any] = []
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is not None:
            found += inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]
    return found


def split_into_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tile the range [start, end) of a flattened array with boxes, in order.

    Each box is contiguous in the flattened array: runs of whole rows, and the partial rows around them.

    Args:
        shape: shape of the array.
        start: first element.
        end: one past the last element.

    Yields:
        (offset, size) of each box, both of the length of `shape`.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # inside one row
        yield from _boxes_in_row(shape, last, start - last * row, end - last * row)
        return
    yield from _boxes_in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, 0, end - last * row)


def _boxes_in_row(
    shape: Sequence[int], row: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in split_into_boxes(shape[1:], start, end):
        yield (row, *offset), (1, *size)


def _shard_range(base: Any, flat: Tensor, start: int, end: int, prefix: str) -> Iterator[ShardedTensor]:
    """Describe the range [start, end) of a weight, with values `flat`, as sharded tensors of irregular bounds."""
    for shard, begin in _regular_parts(base):
        # An expert's weight is a row of a tensor with one more axis, which its own shape does not show.
        shape = (*[1] * shard.prepend_axis_num, *shard.local_shape)
        low, high = max(start, begin), min(end, begin + prod(shape))
        box_start = low - start
        for offset, size in split_into_boxes(shape, low - begin, high - begin):
            data = flat[box_start : box_start + prod(size)].view(size)
            box_start += prod(size)
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
    """Yield the sharded tensors of a weight and the start of each in the flattened weight."""
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
