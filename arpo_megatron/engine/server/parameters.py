"""The places in SGLang's parameters where Hugging Face tensors go when they are loaded.

SGLang fuses and splits tensors as it loads them. To find out where a tensor goes, the model's own `load_weights` is
called with tensors of the right shape on torch's device "meta", which have no memory. Each copy that it would make from
a view of such a tensor into a parameter is recorded and not made.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arpo_megatron.engine.wire.boxes import Box, BoxPart, TensorType, box_of, inside, intersect, size

Copy = tuple[Tensor, Tensor]
"""Values in a parameter, and the view of a tensor that would be copied there. The view's storage is the whole tensor's,
so its offset and strides are the place within the tensor."""


def find_copies(model: nn.Module, types: Mapping[str, TensorType]) -> dict[str, list[Copy]]:
    """Return the copies that loading each tensor would make, on any device and without memory for the tensors.

    Args:
        model: an SGLang model.
        types: the tensors by Hugging Face name.

    Raises:
        Exception: any error of the model's loader (unknown name, wrong shape), or torch's if the loader computes with
            a tensor's values.
    """
    sources = {name: kind.meta() for name, kind in types.items()}
    recorder = _CopyRecorder(sources)
    with torch.no_grad(), recorder, _scales_under_both_names(model):
        model.load_weights(list(sources.items()))  # type: ignore[operator]  # a method of every SGLang model
    return recorder.copies


@contextmanager
def _scales_under_both_names(model: nn.Module) -> Iterator[None]:
    """Let the model's loader find each scale of a block without "_inv" in its name, too.

    SGLang's loader of Llama renames the scales (0.5.18), but the layers keep the name that all other loaders use.
    """
    named_parameters = model.named_parameters

    def both(*args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in named_parameters(*args, **options):
            yield name, parameter
            if name.endswith(".weight_scale_inv"):
                yield name.removesuffix("_inv"), parameter

    model.named_parameters = both  # type: ignore[method-assign]  # deleted below
    try:
        yield
    finally:
        del model.named_parameters


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


class EngineParameters:
    """The parts of Hugging Face tensors that one rank of an engine holds.

    Args:
        model: an SGLang model.
        types: the tensors of a push.
        together: names of the tensors that form one parameter, for loaders that compute with all of them at once.
    """

    def __init__(self, model: nn.Module, types: Mapping[str, TensorType], together: Sequence[Sequence[str]]) -> None:
        self._model = model
        self.types = types
        self.device = next(model.parameters()).device
        self._memory = _memory_of(model)
        self._copies = copies = find_copies(model, types)
        parts = {name: _as_boxes(of_name, types[name].shape) for name, of_name in copies.items()}
        self._parts = {name: boxes for name, boxes in parts.items() if boxes}
        # Without a copy, the rank does not hold the tensor.
        computed = {name for name in copies if copies[name] and name not in self._parts}
        self._computed: dict[str, list[str]] = {}
        """Tensors that the loader computes with: for each one, those of its parameter."""
        for names in together:
            mine = [name for name in names if name in computed]
            self._computed |= dict.fromkeys(mine, mine)
        self._whole: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Size of what this rank holds, in the number format in which it arrives."""
        return sum(size(box) * self.types[name].torch_dtype.itemsize for name, box in self._held())

    def boxes(self) -> dict[str, list[Box]]:
        """Return the boxes that this rank must receive, by tensor."""
        found: dict[str, list[Box]] = {}
        for name, box in self._held():
            found.setdefault(name, []).append(box)
        return found

    def known_copies(self, model: nn.Module, types: Mapping[str, TensorType]) -> dict[str, list[Copy]] | None:
        """Return the result of `find_copies` if it is known and no parameter was replaced since; None otherwise."""
        known = model is self._model and types == self.types and _memory_of(model) == self._memory
        return self._copies if known else None

    def check_cover(self, pieces: Sequence[BoxPart]) -> None:
        """Check a plan for this rank.

        Raises:
            ValueError: a part is left out, or arrives twice, or lies outside, or FP8 weights would be cast.
        """
        for name, held in self._parts.items():
            _check_formats(name, self.types[name].torch_dtype, [values.dtype for _, values in held])
        arriving: dict[tuple[str, int], list[Box]] = {}
        for piece in pieces:
            arriving.setdefault((piece.name, piece.at), []).append(piece.box)
        for name, boxes in self.boxes().items():
            for at, box in enumerate(boxes):
                parts = arriving.pop((name, at), [])
                twice = any(intersect(one, other) for i, one in enumerate(parts) for other in parts[:i])
                outside = any(intersect(part, box) != part for part in parts)
                if twice or outside or sum(map(size, parts)) != size(box):
                    raise ValueError(f"the plan does not bring each element of {name}{list(box)} once")
        if arriving:
            raise ValueError(f"the plan brings {next(iter(arriving))[0]}, which this rank does not hold")

    def begin(self) -> None:
        """Begin a push: nothing has arrived."""
        self._whole = {}
        self._missing = {name: size(self.types[name].whole) for name in self._computed}

    def contiguous(self, pieces: Sequence[BoxPart], device: torch.device) -> Tensor | None:
        """Return the place of a message's only piece if its bytes can be received right there; None otherwise."""
        if len(pieces) > 1 or device != self.device:
            return None
        place = self._place(pieces[0])
        return place if place.is_contiguous() and place.dtype == self.types[pieces[0].name].torch_dtype else None

    def store(self, pieces: Sequence[BoxPart], values: Sequence[Tensor | None]) -> None:
        """Copy the values of pieces into the parameters; None for values that were received in place."""
        for piece, received in zip(pieces, values, strict=True):
            if received is not None:
                self._place(piece).copy_(received)
            if piece.name in self._missing:
                self._missing[piece.name] -= size(piece.box)
                names = self._computed[piece.name]
                if not any(self._missing[name] for name in names):
                    with _scales_under_both_names(self._model):
                        own = [(name, self._whole.pop(name)) for name in names]
                        self._model.load_weights(own)  # type: ignore[operator]  # as in `find_copies`

    def end(self) -> None:
        """End a push. Raises ValueError: a tensor that the loader computes with has not arrived whole."""
        if incomplete := [name for name, missing in self._missing.items() if missing]:
            raise ValueError(f"{incomplete[0]} has not arrived whole")

    def _held(self) -> Iterator[tuple[str, Box]]:
        for name, parts in self._parts.items():
            yield from ((name, box) for box, _ in parts)
        yield from ((name, self.types[name].whole) for name in self._computed)

    def _place(self, piece: BoxPart) -> Tensor:
        if piece.name in self._parts:
            box, values = self._parts[piece.name][piece.at]
            return inside(values, box, piece.box)
        if piece.name not in self._whole:
            kind = self.types[piece.name]
            self._whole[piece.name] = torch.empty(kind.shape, dtype=kind.torch_dtype, device=self.device)
        return inside(self._whole[piece.name], self.types[piece.name].whole, piece.box)


def _memory_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return the place in memory, and its form, of each parameter and buffer."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, each.data_ptr(), each.dtype, each.shape, each.stride()) for name, each in tensors]


def _check_formats(name: str, sent: torch.dtype, held: Sequence[torch.dtype]) -> None:
    """Raise ValueError if FP8 weights would be cast: their scales belong to one format."""
    if wrong := [each for each in held if each != sent and 1 in (each.itemsize, sent.itemsize)]:
        raise ValueError(f"the engine holds {name} in {wrong[0]}, but the trainer sends {sent}")


def _as_boxes(copies: Sequence[Copy], whole: Sequence[int]) -> list[tuple[Box, Tensor]]:
    """Return the boxes that are copied, and their places; none if one of the copies is not of a box."""
    found: list[tuple[Box, Tensor]] = []
    for values, view in copies:
        box = box_of(view, whole)
        if box is None or values.shape != view.shape:
            return []
        found.append((box, values.detach()))
    return found
