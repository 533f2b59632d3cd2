"""How an engine receives the buckets of a broadcast push: in the background, and straight into its parameters.

SGLang by itself receives a bucket into new memory, waits for it, and copies it into the parameters. Here:

- A tensor that becomes one contiguous part of a parameter, in the same number format, is received right there. Others
  (an engine of several ranks splits most tensors, a quantized engine converts them) are received into new memory and
  loaded by SGLang when their bucket is complete.
- A tensor in blocks of rows is handled block by block. Blocks of a split tensor are copied as they arrive. The whole
  tensor is collected first only if SGLang's loader computes with it (a quantized engine).
- The request for a bucket is answered when the bucket before it has been loaded, so the network never idles. An empty
  bucket ends a push.
- Each bucket is acknowledged in the process group, before its tensors: two requests in flight at the same time could
  overtake each other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arpo_megatron.engine.server.parameters import Copy, find_copies
from arpo_megatron.engine.wire.buckets import Block

_RECEIVER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed"
)
_OLDER_RECEIVER = "sglang.srt.model_executor.model_runner.ModelRunner.update_weights_from_distributed"
"""The method in sglang 0.5.12, which has no `WeightUpdater`."""


def register_hooks() -> None:
    """Register the hook of the weight updater in this process; SGLang's `load_plugins` applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    older = find_spec("sglang.srt.model_executor.model_runner_components") is None
    receiver = _OLDER_RECEIVER if older else _RECEIVER
    HookRegistry.register(receiver, _receive_in_runner if older else _receive, HookType.REPLACE)
    for way in ("distributed", "tensor", "disk"):
        HookRegistry.register(f"{receiver.rpartition('_')[0]}_{way}", _agree, HookType.AROUND)


def whole_parameters(
    model: nn.Module, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Return the part of a parameter that each tensor becomes, if it is copied once, whole and unchanged."""
    # Tensors with one element are left out, because SGLang's loader reads their value.
    wanted = {name: (shape, dtype) for name, dtype, shape in zip(names, dtypes, shapes, strict=True) if prod(shape) > 1}
    targets = {}
    for name, copies in find_copies(model, wanted).items():
        if len(copies) == 1:
            values, view = copies[0]
            same = values.dtype == view.dtype and values.shape == view.shape
            whole = view.numel() == prod(wanted[name][0])
            if same and whole and values.is_contiguous() and view.is_contiguous():
                targets[name] = values.detach()
    return targets


def block_copies(copies: Sequence[Copy], block: Block) -> list[Copy] | None:
    """Return the part of a tensor's copies that a block of its rows provides.

    Args:
        copies: the copies that loading the whole tensor would make.
        block: some of its rows.

    Returns:
        Parts of parameters, and where their values are in the whole tensor. None if loading does more than copy rows or
        parts of rows.
    """
    width, parts = prod(block.tensor.shape[1:]), []
    for values, view in copies:
        plain = values.dtype == view.dtype == block.tensor.dtype and values.shape == view.shape
        if not plain or view.stride() != block.whole.stride():
            return None
        row = int(view.storage_offset()) // width
        here = slice(max(block.rows.start - row, 0), max(block.rows.stop - row, 0))
        if len(view[here]):
            parts.append((values[here].detach(), view[here]))
    return parts if copies else None


@dataclass(slots=True)
class _ArrivingBucket:
    """Tensors of one bucket, from the start of their transfer until the model has them."""

    works: list[Any]
    """Pending operations of the process group."""
    to_load: list[tuple[str, Tensor]] = field(default_factory=list)
    """Tensors received into new memory, for SGLang's loader."""
    to_copy: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parts of parameters, and the received values that are copied there."""
    collected: Tensor | None = None
    """A whole tensor of which more blocks will come."""

    def load(self, model: nn.Module) -> None:
        """Wait for the bucket and put all of it into the model."""
        for work in self.works:
            work.wait()
        for values, received in self.to_copy:
            values.copy_(received)
        if self.to_load:
            model.load_weights(self.to_load)  # type: ignore[operator]  # a method of every SGLang model


_arriving: dict[str, _ArrivingBucket] = {}
"""The newest bucket, by the name of its process group."""


def _receive(
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Replace `WeightUpdater.update_weights_from_distributed`; return whether it succeeded, and a message."""
    try:
        model, group = updater.get_model(), updater._model_update_group[group_name]
        previous = _arriving.pop(group_name, None)
        _arriving.clear()  # left by an interrupted push, whose group is gone
        formats = [getattr(torch, dtype) for dtype in dtypes]
        quantized = updater.get_model_runner().server_args.quantization is not None  # its loader computes
        tensors = [torch.empty(shape, dtype=kind, device="meta") for kind, shape in zip(formats, shapes, strict=True)]
        device = next(model.parameters()).device
        if (block := Block.from_load_format(load_format, names, tensors)) is not None:
            copies = [] if quantized else _copies_or_none(model, block)
            bucket = _start_block(group, device, block, copies, None if previous is None else previous.collected)
        else:
            targets = {} if quantized else _targets_or_none(model, names, formats, shapes)
            bucket = _start(group, device, targets, zip(names, formats, shapes, strict=True))
        if names:
            _arriving[group_name] = bucket
        if previous is not None:
            previous.load(model)
    except Exception as error:  # it would end the engine; the gate stays closed, and the sender gets the message
        return False, f"Failed to update parameter online: {error}"
    return True, "Succeeded to update parameter online."


def _receive_in_runner(runner: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    updater = SimpleNamespace(
        get_model=lambda: runner.model,
        get_model_runner=lambda: runner,
        _model_update_group=runner._model_update_group,
    )
    return _receive(updater, *args, **kwargs)


def _agree(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Answer for all ranks of the engine: SGLang answers when its first rank has finished, and only for that rank."""
    from sglang.srt.distributed import get_tp_group

    mine = original(*args, **kwargs)
    group = get_tp_group().cpu_group
    answers = [mine] * group.size()
    if len(answers) > 1:
        dist.all_gather_object(answers, mine, group=group)
    return next((answer for answer in answers if not answer[0]), mine)


def _targets_or_none(
    model: nn.Module, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    try:
        return whole_parameters(model, names, dtypes, shapes)
    except Exception:  # any loader's; loading the received tensor will raise it again, and report it then
        return {}


def _copies_or_none(model: nn.Module, block: Block) -> Sequence[Copy]:
    try:
        return find_copies(model, {block.name: (block.whole.shape, block.tensor.dtype)})[block.name]
    except Exception:  # see `_targets_or_none`
        return []


def _start_block(
    group: Any, device: torch.device, block: Block, copies: Sequence[Copy], collected: Tensor | None
) -> _ArrivingBucket:
    """Start to receive a block: into the parameter if it is one part of it, next to it, or into the whole tensor.

    The first block of a tensor allocates the whole tensor.
    """
    bucket = _ArrivingBucket([_acknowledge(group, device)])
    parts = block_copies(copies, block)
    if parts is None:
        if not block.first:
            collected = torch.empty_like(block.whole, device=device)
        if collected is None:
            raise ValueError(f"{block.name}: its rows from {block.first} on have arrived before the first ones")
        target = collected[block.rows]
        bucket.to_load, bucket.collected = ([(block.name, collected)], None) if block.is_last else ([], collected)
    elif len(parts) == 1 and parts[0][0].shape == block.tensor.shape and parts[0][0].is_contiguous():
        target = parts[0][0]
    else:
        target = torch.empty_like(block.tensor, device=device)
        start = block.first * prod(block.tensor.shape[1:])
        for values, view in parts:
            received = target.as_strided(view.shape, view.stride(), int(view.storage_offset()) - start)
            bucket.to_copy.append((values, received))
    bucket.works.append(dist.broadcast(target, src=0, group=group, async_op=True))
    return bucket


def _start(
    group: Any,
    device: torch.device,
    targets: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
) -> _ArrivingBucket:
    bucket = _ArrivingBucket([_acknowledge(group, device)])
    for name, dtype, shape in tensors:
        if (target := targets.get(name)) is None:
            target = torch.empty(tuple(shape), dtype=dtype, device=device)
            bucket.to_load.append((name, target))
        bucket.works.append(dist.broadcast(target, src=0, group=group, async_op=True))
    return bucket


def _acknowledge(group: Any, device: torch.device) -> Any:
    one = torch.zeros(1, device="cpu" if dist.get_backend(group) == "gloo" else device)
    return dist.all_reduce(one, group=group, async_op=True)
