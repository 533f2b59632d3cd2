"""Which boxes of a push an engine rank holds, and how pieces get into its parameters."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arpo_megatron.engine.server import receive
from arpo_megatron.engine.server.checksums import held_pieces
from arpo_megatron.engine.server.parameters import EngineParameters, find_copies
from arpo_megatron.engine.wire.boxes import Box, BoxPart, TensorType, box_of, inside, size
from arpo_megatron.engine.wire.checksums import checksummed, difference


class Loader(nn.Module):
    """Loads tensors in all ways of SGLang's models: fused, split, cast, twice, computed with, by value."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.rows = nn.Parameter(torch.zeros(2, 4))
        self.columns = nn.Parameter(torch.zeros(4, 2))
        self.narrow = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        self.embedding = nn.Parameter(torch.zeros(4, 4))
        self.head = nn.Parameter(torch.zeros(4, 4))
        self.scaled = nn.Parameter(torch.zeros(4, 4))
        self.scalar = nn.Parameter(torch.zeros(1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "gate":
                    self.fused.data[:2].copy_(tensor)
                case "up":
                    self.fused.data[2:].copy_(tensor)
                case "rows":
                    self.rows.data.copy_(tensor[2:])
                case "columns":
                    self.columns.data.copy_(tensor[:, :2])
                case "transposed":
                    self.embedding.data.copy_(tensor.t())
                case "cast":
                    self.narrow.data.copy_(tensor)
                case "twice":
                    self.embedding.data.copy_(tensor)
                    self.head.data.copy_(tensor)
                case "moved":
                    self.head.data.copy_(tensor.to("cpu", self.head.dtype))
                case "scaled":
                    self.scaled.data.copy_(tensor * 2)
                case "scalar":
                    self.scalar.data.fill_(tensor.item())


SIZE = (4, 4)
HELD = {"gate", "up", "rows", "columns", "cast", "twice"}


def shapes(*names: str) -> dict[str, TensorType]:
    return {name: TensorType((2, 4) if name == "gate" else SIZE, "float32") for name in names}


def test_rank_holds_the_boxes_that_loading_copies() -> None:
    model = Loader()
    types = shapes(*HELD, "transposed", "unknown")
    held = EngineParameters(model, types, [[name] for name in types]).boxes()
    assert held == {
        "gate": [((0, 2), (0, 4))],
        "up": [((0, 4), (0, 4))],
        "rows": [((2, 4), (0, 4))],
        "columns": [((0, 4), (0, 2))],
        "cast": [((0, 4), (0, 4))],
        "twice": [((0, 4), (0, 4))] * 2,
        "transposed": [((0, 4), (0, 4))],
    }
    assert not any(parameter.any() for parameter in model.parameters())  # asking has changed nothing


def test_find_copies_takes_no_memory() -> None:
    names = ("gate", "up", "rows", "columns", "cast", "twice", "scaled")
    found = find_copies(Loader(), dict.fromkeys(names, TensorType((2**20, 2**20), "float32")))  # 4 TiB each
    assert [len(found[name]) for name in names] == [1, 1, 1, 1, 1, 2, 0]
    assert all(place.is_meta for copies in found.values() for _, place in copies)


def test_checksum_is_that_of_the_whole_tensor_however_an_engine_holds_it() -> None:
    model = Loader()
    types = shapes("up", "transposed", "twice") | {"cast": TensorType(SIZE, "bfloat16")}
    for name, kind in types.items():
        tensor = torch.randn(kind.shape, dtype=kind.torch_dtype)
        model.load_weights([(name, tensor)])
        bits = tensor.flatten().view(torch.int16 if name == "cast" else torch.int32).tolist()
        expected = sum(value * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
        held = held_pieces(model, {name: kind})[name]
        assert difference(held, expected, len(bits)) is None, name
        assert "checksum" in str(difference(held, expected + 1, len(bits)))
        assert difference(held, expected, 17) == "it holds 16 of 17 elements"
    with pytest.raises(ValueError, match=r"cast is torch\.bfloat16 here and float32 in the trainer"):
        held_pieces(model, shapes("cast"))


def test_checksums_of_many_tensors_wait_for_the_device_once() -> None:
    """Reading a value of one tensor waits until a GPU has done all that it was given."""
    read = list[str]()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                read.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = [torch.randn(4, 4) for _ in range(20)]
    with Reads():
        found = checksummed([(each, each) for each in tensors])
    assert not read
    assert [each.checksum for each in found] == [checksummed([(each, each)])[0].checksum for each in tensors]
    assert len({each.checksum for each in found}) == 20
    assert checksummed([]) == []


def test_checksums_read_the_parameters_that_the_model_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is asked once for a layout, and again after a parameter has been replaced."""
    model, types, asked = Loader(), shapes("up", "rows"), list[nn.Module]()
    request = {"types": {name: kind.as_json() for name, kind in types.items()}, "together": [["up"], ["rows"]]}
    load = Loader.load_weights
    monkeypatch.setattr(Loader, "load_weights", lambda self, weights: (asked.append(self), load(self, weights)))
    monkeypatch.setattr(receive, "shard", receive.Shard())
    receive.shard.describe(model, request)

    def checksums() -> list[int]:
        return [piece.checksum for pieces in held_pieces(model, types).values() for piece in pieces]

    zero = checksums()
    model.rows.data.fill_(1.0)
    stored = checksums()
    assert stored != zero, "values that arrived in place"
    assert len(asked) == 1
    model.rows.data = torch.full((2, 4), 2.0)
    assert checksums() not in (zero, stored)
    model.fused = nn.Parameter(torch.ones(6, 4))
    assert checksums()[0] not in (zero[0], stored[0])
    assert len(asked) == 3


def pieces_of(held: dict[str, list[Box]]) -> list[BoxPart]:
    """Every box in two blocks of rows."""
    found = []
    for name, boxes in held.items():
        for at, ((first, last), *others) in enumerate(boxes):
            for rows in ((first, first + 1), (first + 1, last)):
                box = (rows, *others)
                found.append(BoxPart(name, at, box, 4 * size(box)))
    return found


def test_pieces_equal_loading_the_whole_tensor() -> None:
    model, expected, loaded = Loader(), Loader(), list[list[str]]()
    names = ["gate", "up", "rows", "columns", "cast", "transposed"]
    types, together = shapes(*names), [["gate", "up"], *([name] for name in names[2:])]
    parameters, load = EngineParameters(model, types, together), model.load_weights

    def recording(weights: Iterable[tuple[str, Tensor]]) -> None:
        given = list(weights)
        loaded.append([name for name, _ in given])
        load(given)

    model.load_weights = recording  # type: ignore[method-assign]
    values = {name: torch.randn(kind.shape) for name, kind in types.items()}
    expected.load_weights(values.items())
    pieces = pieces_of(parameters.boxes())
    parameters.check_cover(pieces)
    parameters.begin()
    for piece in pieces:
        received = inside(values[piece.name], types[piece.name].whole, piece.box)
        if (place := parameters.contiguous([piece], torch.device("cpu"))) is not None:
            place.copy_(received)
            parameters.store([piece], [None])
        else:
            parameters.store([piece], [received])
    parameters.end()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert loaded == [["transposed"]]


def test_scales_that_a_loader_renames_and_computes_with_are_stored() -> None:
    """SGLang's Llama looks for scales without "_inv" in their names. Asking and storing both find them."""

    class Renaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4, bias=False)
            self.proj.weight_scale_inv = nn.Parameter(torch.zeros(4, 4))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            parameters = dict(self.named_parameters())
            for name, tensor in weights:
                parameters[name.removesuffix("_inv")].data.copy_(tensor.t())

    model, name = Renaming(), "proj.weight_scale_inv"
    parameters = EngineParameters(model, shapes(name), [[name]])
    sent = torch.randn(SIZE)
    parameters.begin()
    parameters.store([BoxPart(name, 0, ((0, 4), (0, 4)), 64)], [sent])
    parameters.end()
    assert torch.equal(model.proj.weight_scale_inv, sent.t())


def test_plan_must_bring_everything_once() -> None:
    types = shapes("gate", "columns")
    parameters = EngineParameters(Loader(), types, [["gate"], ["columns"]])
    plan = pieces_of(parameters.boxes())
    parameters.check_cover(plan)
    outside = BoxPart("columns", 0, ((0, 4), (2, 4)), 32)
    for wrong in (plan[1:], [*plan, plan[0]], [each for each in plan if each.name == "gate"] + [outside]):
        with pytest.raises(ValueError, match=r"the plan does not bring each element of (gate|columns)"):
            parameters.check_cover(wrong)
    with pytest.raises(ValueError, match="brings up, which this rank does not hold"):
        parameters.check_cover([*plan, BoxPart("up", 0, ((0, 4), (0, 4)), 64)])


def test_push_ends_only_when_computed_tensors_are_whole() -> None:
    parameters = EngineParameters(Loader(), shapes("transposed"), [["transposed"]])
    parameters.begin()
    parameters.store([BoxPart("transposed", 0, ((0, 2), (0, 4)), 32)], [torch.ones(2, 4)])
    with pytest.raises(ValueError, match="transposed has not arrived whole"):
        parameters.end()


@pytest.mark.parametrize(
    ("index", "box"),
    [
        ((slice(1, 3), slice(2, 5)), ((1, 3), (2, 5))),
        ((slice(0, 1), slice(0, 6)), ((0, 1), (0, 6))),
        ((slice(3, 4), slice(5, 6)), ((3, 4), (5, 6))),
    ],
)
def test_box_of_a_view(index: Any, box: Box) -> None:
    assert box_of(torch.empty(4, 6, device="meta")[index], (4, 6)) == box
    assert box_of(torch.empty(4, 6, device="meta").t(), (6, 4)) is None
