"""Where SGLang's models put the tensors that they are given.

SGLang fuses and divides tensors as it loads them. Where each of them goes is asked of the model's own `load_weights`:
it gets tensors of the right shape that have no memory (torch's device "meta"), and every copy that it would make from
a view of one into a parameter is looked at instead of made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Copy = tuple[Tensor, Tensor]
"""Values in a parameter, and the view of a tensor (its storage is the whole tensor's) that would be copied there."""


def places(model: nn.Module, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, list[Copy]]:
    """For each tensor, by Hugging Face name with shape and dtype, the copies that loading it would make.

    It takes no memory, on any device and for tensors of any size. Errors are those of the model's loader, which knows
    neither every name nor any shape, and torch's where it computes with a tensor's values.
    """
    nowhere = {name: torch.empty(tuple(size), dtype=dtype, device="meta") for name, (size, dtype) in tensors.items()}
    copies = _Copies(nowhere)
    with torch.no_grad(), copies:
        model.load_weights(list(nowhere.items()))  # type: ignore[operator]  # not nn.Module's, but every SGLang model's
    return copies.found


class _Copies(TorchDispatchMode):
    """Notes copies from views of some tensors, in `found`. No copy is made, of what was computed from them neither."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._names = {_storage(tensor): name for name, tensor in sources.items()}
        self.found: dict[str, list[Copy]] = {name: [] for name in sources}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            name = self._names.get(_storage(args[1]))
            if name is not None:
                self.found[name].append((args[0], args[1]))
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            return args[0] if dtype == args[0].dtype else args[0].to(dtype)  # it counts as being on every device
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    """The same for a tensor and its views, as long as one of them lives. Without memory they have no address."""
    return int(tensor.untyped_storage()._cdata)
