"""Which tensors of a push an engine receives straight into its parameters, and how it assembles the others."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arpo_megatron.engine.server import receive
from arpo_megatron.engine.server.checksums import held_pieces
from arpo_megatron.engine.server.parameters import find_copies
from arpo_megatron.engine.server.receive import whole_parameters
from arpo_megatron.engine.wire.buckets import Block
from arpo_megatron.engine.wire.checksums import Sample


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


def test_whole_parameters_are_those_that_loading_only_copies() -> None:
    model = Loader()
    shapes = {"gate": (2, 4), "up": (4, 4), "moved": (4, 4), "scalar": (1,)}
    shapes |= dict.fromkeys(("rows", "columns", "transposed", "cast", "twice", "scaled", "unknown"), (4, 4))
    found = whole_parameters(model, list(shapes), [torch.float32] * len(shapes), list(shapes.values()))
    assert found.keys() == {"gate", "up", "moved"}
    found["gate"].fill_(1)
    found["up"].fill_(2)
    assert model.fused[:2].eq(1).all()
    assert model.fused[2:].eq(2).all()
    assert not model.scalar.any()  # asking has changed nothing
    assert not model.scaled.any()


def test_find_copies_takes_no_memory() -> None:
    names, size = ("gate", "up", "rows", "columns", "cast", "twice", "scaled"), (2**20, 2**20)  # 4 TiB each
    found = find_copies(Loader(), dict.fromkeys(names, (size, torch.float32)))
    assert [len(found[name]) for name in names] == [1, 1, 1, 1, 1, 2, 0]
    assert all(place.is_meta for copies in found.values() for _, place in copies)
    assert whole_parameters(Loader(), names, [torch.float32] * len(names), [size] * len(names)) == {}
    (piece,) = held_pieces(Loader(), {"up": Sample(size, "float32", 1, 2)})["up"]
    assert (piece.offset, piece.sizes) == (2**20, (1, 2**20))


class Wire:
    """Stands in for a process group; broadcast tensors arrive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value = torch.empty(0)
        self.targets: list[int] = []
        self.done = SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(receive.dist, "get_backend", lambda _: "gloo")
        monkeypatch.setattr(receive.dist, "all_reduce", lambda *_, **__: self.done)
        monkeypatch.setattr(receive.dist, "broadcast", self._broadcast)

    def _broadcast(self, tensor: Tensor, **_: Any) -> SimpleNamespace:
        tensor.copy_(self.value)
        self.targets.append(tensor.untyped_storage().data_ptr())
        return self.done


def push(wire: Wire, model: nn.Module, block: Block | None) -> tuple[bool, str]:
    runner = SimpleNamespace(
        model=model, _model_update_group={"group": None}, server_args=SimpleNamespace(quantization=None)
    )
    if block is None:
        return receive._receive_in_runner(runner, [], [], [], group_name="group")
    wire.value = block.tensor
    what = [[block.name], ["float32"], [list(block.tensor.shape)]]
    return receive._receive_in_runner(runner, *what, group_name="group", load_format=block.load_format)


@pytest.mark.parametrize(
    ("name", "parameter", "index", "in_place"),
    [
        ("up", "fused", slice(2, 6), 3),
        ("rows", "rows", ..., 1),
        ("columns", "columns", ..., 0),
        ("twice", "embedding", ..., 0),
        ("twice", "head", ..., 0),
        ("cast", "narrow", ..., 0),
        ("transposed", "embedding", ..., 0),
        ("scaled", "scaled", ..., 0),
    ],
)
def test_blocks_of_rows_equal_the_whole_tensor(
    monkeypatch: pytest.MonkeyPatch, name: str, parameter: str, index: Any, in_place: int
) -> None:
    wire, model, expected = Wire(monkeypatch), Loader(), Loader()
    whole = torch.randn(4, 4)
    expected.load_weights([(name, whole)])
    for first, last in ((0, 1), (1, 3), (3, 4)):
        assert push(wire, model, Block(name, whole[first:last], first, 4)) == (
            True,
            "Succeeded to update parameter online.",
        )
    assert push(wire, model, None)[0]
    assert torch.equal(getattr(model, parameter)[index], getattr(expected, parameter)[index])
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    assert sum(target in own for target in wire.targets) == in_place
    if name in ("cast", "transposed", "scaled"):  # collected, and loaded as one
        assert len(set(wire.targets)) == 1


def test_block_before_the_first_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    done, why = push(Wire(monkeypatch), Loader(), Block("scaled", torch.ones(2, 4), 2, 4))
    assert not done
    assert "scaled: its rows from 2 on have arrived before the first ones" in why


def test_block_copies_are_the_rows_in_each_part_of_a_parameter() -> None:
    """A block may contain rows of both ranks of a split vocabulary."""
    copies = find_copies(Loader(), {"rows": ((4, 4), torch.float32)})["rows"]  # rows 2 and 3

    def taken(first: int, last: int) -> list[tuple[int, ...]] | None:
        found = receive.block_copies(copies, Block("rows", torch.empty(last - first, 4), first, 4))
        return None if found is None else [(int(place.storage_offset()), *values.shape) for values, place in found]

    assert taken(0, 2) == []
    assert taken(1, 3) == [(8, 1, 4)]
    assert taken(3, 4) == [(12, 1, 4)]
    assert receive.block_copies([], Block("unknown", torch.empty(1, 4), 0, 4)) is None
