"""The places in SGLang's parameters where Hugging Face tensors go when they are loaded.

SGLang fuses and splits tensors as it loads them. To find out where a tensor goes, the model's own `load_weights` is
called with tensors of the right shape on torch's device "meta", which have no memory. Each copy that it would make from
a view of such a tensor into a parameter is recorded and not made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Copy = tuple[Tensor, Tensor]
"""Values in a parameter, and the view of a tensor that would be copied there. The view's storage is the whole tensor's,
so its offset and strides are the place within the tensor."""


def find_copies(model: nn.Module, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, list[Copy]]:
    """Return the copies that loading each tensor would make, on any device and without memory for the tensors.

    Args:
        model: an SGLang model.
        tensors: shape and dtype by Hugging Face name.

    Raises:
        Exception: any error of the model's loader (unknown name, wrong shape), or torch's if the loader computes with
            a tensor's values.
    """
    sources = {name: torch.empty(tuple(size), dtype=dtype, device="meta") for name, (size, dtype) in tensors.items()}
    recorder = _CopyRecorder(sources)
    with torch.no_grad(), recorder:
        model.load_weights(list(sources.items()))  # type: ignore[operator]  # a method of every SGLang model
    return recorder.copies


class _CopyRecorder(TorchDispatchMode):
    """Records copies from views of the sources. It makes no copies at all, also none of tensors computed from them."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._names = {_storage_id(tensor): name for name, tensor in sources.items()}
        self.copies: dict[str, list[Copy]] = {name: [] for name in sources}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            name = self._names.get(_storage_id(args[1]))
            if name is not None:
                self.copies[name].append((args[0], args[1]))
            return args[0]
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            return args[0] if dtype == args[0].dtype else args[0].to(dtype)  # pretend that it is on every device
        return func(*args, **(kwargs or {}))


def _storage_id(tensor: Tensor) -> int:
    """Return an id that a tensor shares with its views while one of them lives; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
