"""Checksums of the weights inside an engine, under Hugging Face names, for SGLang's own weight checker.

SGLang fuses and divides tensors as it loads them. Where a tensor has gone is asked of the model's own `load_weights`:
it gets a tensor of the right shape whose memory is never touched, and every copy that it would make from a view of
that tensor into a parameter is looked at instead of made.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arpo_megatron.weights.checksums import CHECKSUM_ACTION, Piece, Sample

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"


def register() -> None:
    """Teach SGLang's weight checker in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECKER, _handle, HookType.AROUND)


def held_pieces(model: nn.Module, name: str, sample: Sample) -> list[Piece]:
    """The pieces of a sample that this rank's parameters hold.

    Raises:
        ValueError: the parameters hold the tensor in another form, so that its bits cannot be compared.
    """
    device = next(model.parameters()).device
    nowhere = torch.empty(sample.sizes, dtype=getattr(torch, sample.dtype), device=device)
    with torch.no_grad(), _Copies(nowhere) as copies:
        model.load_weights([(name, nowhere)])  # type: ignore[operator]  # not nn.Module's, but every SGLang model's
    pieces = [sample.held(values, place) for values, place in copies.found]
    return [piece for piece in pieces if piece is not None]


class _Copies(TorchDispatchMode):
    """Notes copies from views of one tensor, in `found`, and does not make them."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = source.untyped_storage().data_ptr()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self._storage:
            self.found.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def _handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """`WeightChecker.handle`, with one more action."""
    if not action.startswith(CHECKSUM_ACTION):
        return original(checker, action, *args, **kwargs)
    asked = json.loads(action.removeprefix(CHECKSUM_ACTION))
    model = checker._get_model()
    pieces = {name: held_pieces(model, name, Sample(**sample)) for name, sample in asked.items()}
    return {
        "checksums": {name: json.dumps([piece.as_json() for piece in held]) for name, held in pieces.items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info().model_dump(),
    }
