"""Which tensors of a push an engine receives straight into its parameters: those that lie there whole, as they are."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from arpo_megatron.rollout.weight_arrival import whole_places
from arpo_megatron.rollout.weight_checksums import held_pieces
from arpo_megatron.rollout.weight_places import places
from arpo_megatron.weights.checksums import Sample


class Loader(nn.Module):
    """Loads as SGLang's models do: fused, divided, cast, twice, computed with, by value."""

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


def test_a_tensor_has_a_place_where_a_copy_of_it_would_be_all_that_loading_does() -> None:
    model = Loader()
    shapes = {"gate": (2, 4), "up": (4, 4), "moved": (4, 4), "scalar": (1,)}
    shapes |= dict.fromkeys(("rows", "columns", "transposed", "cast", "twice", "scaled", "unknown"), (4, 4))
    found = whole_places(model, list(shapes), [torch.float32] * len(shapes), list(shapes.values()))
    assert found.keys() == {"gate", "up", "moved"}
    found["gate"].fill_(1)
    found["up"].fill_(2)
    assert model.fused[:2].eq(1).all()
    assert model.fused[2:].eq(2).all()
    assert not model.scalar.any()  # asking has changed nothing
    assert not model.scaled.any()


def test_asking_where_tensors_go_takes_no_memory_however_many_and_large_they_are() -> None:
    names, size = ("gate", "up", "rows", "columns", "cast", "twice", "scaled"), (2**20, 2**20)  # 4 TiB each
    found = places(Loader(), dict.fromkeys(names, (size, torch.float32)))
    assert [len(found[name]) for name in names] == [1, 1, 1, 1, 1, 2, 0]
    assert all(place.is_meta for copies in found.values() for _, place in copies)
    assert whole_places(Loader(), names, [torch.float32] * len(names), [size] * len(names)) == {}
    (piece,) = held_pieces(Loader(), {"up": Sample(size, "float32", 1, 2)})["up"]
    assert (piece.offset, piece.sizes) == (2**20, (1, 2**20))
