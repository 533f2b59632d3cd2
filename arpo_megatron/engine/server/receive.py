"""How an engine receives the buckets of a broadcast push: in the background, and straight into its parameters.

SGLang receives a bucket into memory of its own, waits for it, and copies it into the parameters. Here a tensor that
becomes one contiguous part of a parameter, in its own number format, is received there; the others (an engine of
several ranks divides most of them, a quantized one changes them) are loaded by SGLang when all of a bucket is there.
Of a tensor that comes in blocks of rows likewise; where it is divided the rows that are here are copied from each
block, and only where the loader computes with it (a quantized engine's) the whole tensor is collected first.
A request to receive a bucket is answered when the bucket before it has been loaded, so that the network is never
without work; an empty bucket ends a push. In the group's own queue, before its tensors, a bucket is acknowledged: two
announcements that are on their way at once could overtake each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arpo_megatron.engine.server.parameters import Copy, places
from arpo_megatron.engine.wire.buckets import Block

_RECEIVER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed"
)


_OLDER_RECEIVER = "sglang.srt.model_executor.model_runner.ModelRunner.update_weights_from_distributed"
"""Of sglang 0.5.12, which has no updater yet."""


def register() -> None:
    """Teach SGLang's weight updater in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if find_spec("sglang.srt.model_executor.model_runner_components") is None:
        HookRegistry.register(_OLDER_RECEIVER, _receive_in_runner, HookType.REPLACE)
    else:
        HookRegistry.register(_RECEIVER, _receive, HookType.REPLACE)


def whole_places(
    model: nn.Module, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Of the tensors that are copied once, whole and as they are: the values of a parameter that they become."""
    # The loader reads the value of a tensor with one element.
    asked = {name: (shape, dtype) for name, dtype, shape in zip(names, dtypes, shapes, strict=True) if prod(shape) > 1}
    found = {}
    for name, copies in places(model, asked).items():
        if len(copies) == 1:
            values, place = copies[0]
            same = values.dtype == place.dtype and values.shape == place.shape
            whole = place.numel() == prod(asked[name][0])
            if same and whole and values.is_contiguous() and place.is_contiguous():
                found[name] = values.detach()
    return found


@dataclass(slots=True)
class _Arriving:
    """A bucket on its way.

    Attributes:
        works: of the process group.
        others: tensors that are received into memory of their own, and loaded from there.
        copies: parts of a parameter, and what is copied there.
        collected: a whole tensor of which more blocks will come.
    """

    works: list[Any]
    others: list[tuple[str, Tensor]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    collected: Tensor | None = None

    def load(self, model: nn.Module) -> None:
        """Returns when the model has all of it."""
        for work in self.works:
            work.wait()
        for values, received in self.copies:
            values.copy_(received)
        if self.others:
            model.load_weights(self.others)  # type: ignore[operator]  # not nn.Module's, but every SGLang model's


_arriving: dict[str, _Arriving] = {}
"""The last bucket of a group, by the group's name."""


def _receive(
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """In the place of `WeightUpdater.update_weights_from_distributed`: success, and what went wrong."""
    try:
        model, group = updater.get_model(), updater._model_update_group[group_name]
        before = _arriving.pop(group_name, None)
        _arriving.clear()  # what an interrupted push has left: its group is gone, and nothing more will arrive
        formats = [getattr(torch, dtype) for dtype in dtypes]
        quantized = updater.get_model_runner().server_args.quantization is not None  # its loader computes
        tensors = [torch.empty(shape, dtype=kind, device="meta") for kind, shape in zip(formats, shapes, strict=True)]
        device = next(model.parameters()).device
        if (block := Block.announced(load_format, names, tensors)) is not None:
            copies = [] if quantized else _copies_or_none(model, block)
            bucket = _start_block(group, device, block, copies, None if before is None else before.collected)
        else:
            found = {} if quantized else _places_or_none(model, names, formats, shapes)
            bucket = _start(group, device, found, zip(names, formats, shapes, strict=True))
        if names:
            _arriving[group_name] = bucket
        if before is not None:
            before.load(model)
    except Exception as error:  # an exception would end the engine: the sender is told, and the gate stays closed
        return False, f"Failed to update parameter online: {error}"
    return True, "Succeeded to update parameter online."


def _receive_in_runner(runner: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    updater = SimpleNamespace(
        get_model=lambda: runner.model,
        get_model_runner=lambda: runner,
        _model_update_group=runner._model_update_group,
    )
    return _receive(updater, *args, **kwargs)


def _places_or_none(
    model: nn.Module, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    try:
        return whole_places(model, names, dtypes, shapes)
    except Exception:  # of any loader; it meets the same tensor again, and then its words are the answer
        return {}


def block_places(copies: Sequence[Copy], block: Block) -> list[tuple[Tensor, Tensor]] | None:
    """Of the copies that loading the whole tensor would make, what they take of a block: parts of a parameter, and
    where in the whole tensor their values are. None: loading is more than copies of its rows, or parts of them.
    """
    width, found = prod(block.tensor.shape[1:]), []
    for values, place in copies:
        plain = values.dtype == place.dtype == block.tensor.dtype and values.shape == place.shape
        if not plain or place.stride() != block.whole.stride():
            return None
        row = int(place.storage_offset()) // width
        here = slice(max(block.rows.start - row, 0), max(block.rows.stop - row, 0))
        if len(place[here]):
            found.append((values[here].detach(), place[here]))
    return found if copies else None


def _copies_or_none(model: nn.Module, block: Block) -> Sequence[Copy]:
    try:
        return places(model, {block.name: (block.whole.shape, block.tensor.dtype)})[block.name]
    except Exception:  # see `_places_or_none`
        return []


def _start_block(
    group: Any, device: torch.device, block: Block, copies: Sequence[Copy], collected: Tensor | None
) -> _Arriving:
    """Into the parameter where the block is one part of it, else beside it; or into the whole tensor, which is new
    with the first block.
    """
    bucket = _Arriving([_acknowledge(group, device)])
    found = block_places(copies, block)
    if found is None:
        if not block.first:
            collected = torch.empty_like(block.whole, device=device)
        if collected is None:
            raise ValueError(f"{block.name}: its rows from {block.first} on come without those before")
        target = collected[block.rows]
        bucket.others, bucket.collected = ([(block.name, collected)], None) if block.is_last else ([], collected)
    elif len(found) == 1 and found[0][0].shape == block.tensor.shape and found[0][0].is_contiguous():
        target = found[0][0]
    else:
        target = torch.empty_like(block.tensor, device=device)
        start = block.first * prod(block.tensor.shape[1:])
        for values, place in found:
            received = target.as_strided(place.shape, place.stride(), int(place.storage_offset()) - start)
            bucket.copies.append((values, received))
    bucket.works.append(dist.broadcast(target, src=0, group=group, async_op=True))
    return bucket


def _acknowledge(group: Any, device: torch.device) -> Any:
    one = torch.zeros(1, device="cpu" if dist.get_backend(group) == "gloo" else device)
    return dist.all_reduce(one, group=group, async_op=True)


def _start(
    group: Any,
    device: torch.device,
    found: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
) -> _Arriving:
    bucket = _Arriving([_acknowledge(group, device)])
    for name, dtype, shape in tensors:
        if (target := found.get(name)) is None:
            target = torch.empty(tuple(shape), dtype=dtype, device=device)
            bucket.others.append((name, target))
        bucket.works.append(dist.broadcast(target, src=0, group=group, async_op=True))
    return bucket
