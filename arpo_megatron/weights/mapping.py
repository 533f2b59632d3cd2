"""Which Hugging Face tensors make up which Megatron parameter, and how tensor parallelism divides them.

`FAMILIES` is the whole truth: one row a parameter. Loading, exporting and pushing read it in one direction or the
other. Megatron fuses query, key and value into one matrix, interleaved by query group (the queries of a group, then
its key, then its value), and gate and up projection into another; each rank holds its own piece of every part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from arpo_megatron.weights.shape import Family, ModelShape


class Layout(Enum):
    """How a rank's parameter is made of the Hugging Face tensors of its row."""

    WHOLE = "every rank holds all of it"
    ROWS = "each tensor divided by rows, the pieces stacked"
    COLUMNS = "divided by columns"
    GROUPS = "each tensor divided by rows, the pieces interleaved by query group"

    @property
    def split_dim(self) -> int | None:
        """The dimension of the Hugging Face tensors that tensor parallelism divides."""
        return {Layout.WHOLE: None, Layout.COLUMNS: 1}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter; `{}` stands for the layer.

    Attributes:
        megatron: its name; a second one is that of Transformer Engine's layer specs, which fuse norms into the
            linear layer behind them.
        hf: Hugging Face names with the sizes of their dimensions (see `sizes`), in Megatron's order.
        layout: how they are divided and put together.
    """

    megatron: tuple[str, ...]
    hf: Mapping[str, tuple[str, ...]]
    layout: Layout


_LAYER, _HF = "decoder.layers.{}.", "model.layers.{}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF + "self_attn."

_COMMON = (
    Row(
        ("embedding.word_embeddings.weight",),
        {"model.embed_tokens.weight": ("vocabulary", "hidden")},
        Layout.ROWS,
    ),
    Row(
        (_LAYER + "input_layernorm.weight", _ATTENTION + "linear_qkv.layer_norm_weight"),
        {_HF + "input_layernorm.weight": ("hidden",)},
        Layout.WHOLE,
    ),
    Row(
        (_ATTENTION + "linear_qkv.weight",),
        {
            _HF_ATTENTION + "q_proj.weight": ("queries", "hidden"),
            _HF_ATTENTION + "k_proj.weight": ("keys", "hidden"),
            _HF_ATTENTION + "v_proj.weight": ("keys", "hidden"),
        },
        Layout.GROUPS,
    ),
    Row(
        (_ATTENTION + "linear_proj.weight",),
        {_HF_ATTENTION + "o_proj.weight": ("hidden", "queries")},
        Layout.COLUMNS,
    ),
    Row(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        {_HF + "post_attention_layernorm.weight": ("hidden",)},
        Layout.WHOLE,
    ),
    Row(
        (_LAYER + "mlp.linear_fc1.weight",),
        {_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        Layout.ROWS,
    ),
    Row(
        (_LAYER + "mlp.linear_fc2.weight",),
        {_HF + "mlp.down_proj.weight": ("hidden", "ffn")},
        Layout.COLUMNS,
    ),
    Row(
        ("decoder.final_layernorm.weight",),
        {"model.norm.weight": ("hidden",)},
        Layout.WHOLE,
    ),
)
_QKV_BIAS = Row(
    (_ATTENTION + "linear_qkv.bias",),
    {
        _HF_ATTENTION + "q_proj.bias": ("queries",),
        _HF_ATTENTION + "k_proj.bias": ("keys",),
        _HF_ATTENTION + "v_proj.bias": ("keys",),
    },
    Layout.GROUPS,
)
_Q_NORM = Row((_ATTENTION + "q_layernorm.weight",), {_HF_ATTENTION + "q_norm.weight": ("head",)}, Layout.WHOLE)
_K_NORM = Row((_ATTENTION + "k_layernorm.weight",), {_HF_ATTENTION + "k_norm.weight": ("head",)}, Layout.WHOLE)
_HEAD = Row(("output_layer.weight",), {"lm_head.weight": ("vocabulary", "hidden")}, Layout.ROWS)

FAMILIES: Mapping[Family, tuple[Row, ...]] = {
    "llama": _COMMON,
    "qwen2": (*_COMMON, _QKV_BIAS),
    "qwen3": (*_COMMON, _Q_NORM, _K_NORM),
}
"""Rows of each family; untied models have the output head besides."""


def sizes(shape: ModelShape) -> dict[str, int]:
    """The sizes that the rows' dimensions are named after."""
    return {
        "vocabulary": shape.vocabulary,
        "hidden": shape.hidden,
        "queries": shape.heads * shape.head_dim,
        "keys": shape.kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "ffn": shape.ffn,
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """A row for one layer of one model.

    Attributes:
        megatron: possible names of the parameter.
        hf: Hugging Face names and full shapes.
        layout: as in the row.
        groups: query groups (key/value heads) of the whole model.
    """

    megatron: tuple[str, ...]
    hf: Mapping[str, tuple[int, ...]]
    layout: Layout
    groups: int

    def parameter(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The model's parameter under any of its names.

        Raises:
            KeyError: the model has none of them, so it is not of the shape that the entry was made for.
        """
        for name in self.megatron:
            if name in parameters:
                return parameters[name]
        raise KeyError(f"the model has no parameter {' or '.join(self.megatron)}")

    def piece(self, size: tuple[int, ...], rank: int, ranks: int) -> tuple[slice, ...]:
        """Index of the part of a Hugging Face tensor of shape `size` that a tensor-parallel rank holds."""
        dim = self.layout.split_dim
        if dim is None:
            return tuple(slice(None) for _ in size)
        step = -(-size[dim] // ranks)
        mine = slice(min(rank * step, size[dim]), min((rank + 1) * step, size[dim]))
        return tuple(mine if index == dim else slice(None) for index in range(len(size)))

    def join(self, pieces: Sequence[Tensor], ranks: int) -> Tensor:
        """One rank's parameter from its pieces. A vocabulary that the ranks cannot share evenly ends in zero rows."""
        if self.layout is Layout.GROUPS:
            groups = self.groups // ranks
            return torch.cat([piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces], dim=1).flatten(0, 1)
        if self.layout is Layout.ROWS and len(pieces) == 1:
            (size,) = self.hf.values()
            missing = -(-size[0] // ranks) - len(pieces[0])
            return torch.cat([pieces[0], pieces[0].new_zeros(missing, *size[1:])]) if missing else pieces[0]
        return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]

    def split(self, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The full Hugging Face tensors from the parameter's shards on all tensor-parallel ranks, in rank order."""
        if self.layout.split_dim is None:
            (name,) = self.hf
            yield name, shards[0]
            return
        parts = zip(*(self._parts(shard, len(shards)) for shard in shards), strict=True)
        for (name, size), pieces in zip(self.hf.items(), parts, strict=True):
            whole = torch.cat(pieces, dim=self.layout.split_dim) if len(pieces) > 1 else pieces[0]
            yield name, whole[: size[0]].contiguous()

    def _parts(self, shard: Tensor, ranks: int) -> Sequence[Tensor]:
        """Inverse of `join`, except that padding stays."""
        if self.layout is Layout.GROUPS:
            groups = self.groups // ranks
            widths = [size[0] // self.groups for size in self.hf.values()]
            parts = torch.split(shard.reshape(groups, -1, *shard.shape[1:]), widths, dim=1)
            return [part.flatten(0, 1) for part in parts]
        return shard.chunk(len(self.hf), dim=0)


def entries(shape: ModelShape) -> list[Entry]:
    """Every parameter of the model, layer by layer."""
    rows = (*FAMILIES[shape.family], *(() if shape.tied else (_HEAD,)))
    size = sizes(shape)

    def entry(row: Row, layer: int) -> Entry:
        hf = {name.format(layer): tuple(size[dim] for dim in dims) for name, dims in row.hf.items()}
        return Entry(tuple(name.format(layer) for name in row.megatron), hf, row.layout, shape.kv_heads)

    once = [entry(row, 0) for row in rows if "{}" not in row.megatron[0]]
    layered = [entry(row, layer) for layer in range(shape.layers) for row in rows if "{}" in row.megatron[0]]
    return once + layered
