"""The table of Hugging Face tensors in each Megatron parameter, and how tensor parallelism divides them.

`FAMILIES` has one row per parameter; loading, exporting and pushing read it in either direction. Megatron fuses query,
key and value into one matrix, interleaved by query group (the queries of a group, then its key, then its value), and
gate and up projection into another. Each rank holds its piece of every part. Layers and experts have the numbers of the
whole model here; `weights/shards.py` knows which of them a rank has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from torch import Tensor

from arpo_megatron.models.spec import Family, ModelSpec


class ShardRule(Enum):
    """How a rank's parameter is composed of the Hugging Face tensors of its row."""

    WHOLE = "every rank holds all of it"
    ROWS = "each tensor divided by rows, the pieces stacked"
    COLUMNS = "divided by columns"
    GROUPS = "each tensor divided by rows, the pieces interleaved by query group"

    @property
    def split_dim(self) -> int | None:
        """Dimension of the Hugging Face tensors that tensor parallelism divides; None for whole tensors."""
        return {ShardRule.WHOLE: None, ShardRule.COLUMNS: 1}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter; `{layer}` and `{expert}` stand for their numbers."""

    megatron: tuple[str, ...]
    """Names of the parameter. A second name is that of Transformer Engine's layers, which fuse norms into the linear
    layer after them and keep all experts of a rank in one module."""
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face names with the names of their dimensions (see `sizes`), in Megatron's order."""
    layout: ShardRule
    """How the tensors are divided and combined."""
    copy: bool = False
    """The last pipeline stage's copy of a parameter that another row names: loaded, but never exported."""
    product: bool = False
    """The weights of a matrix product within a layer, which FP8 engines quantize; not the router's."""


_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF + "self_attn."
_EXPERTS, _HF_EXPERT = _LAYER + "mlp.experts.", _HF + "mlp.experts.{expert}."

_COMMON = (
    Row(
        ("embedding.word_embeddings.weight",),
        {"model.embed_tokens.weight": ("vocabulary", "hidden")},
        ShardRule.ROWS,
    ),
    Row(
        (_LAYER + "input_layernorm.weight", _ATTENTION + "linear_qkv.layer_norm_weight"),
        {_HF + "input_layernorm.weight": ("hidden",)},
        ShardRule.WHOLE,
    ),
    Row(
        (_ATTENTION + "linear_qkv.weight",),
        {
            _HF_ATTENTION + "q_proj.weight": ("queries", "hidden"),
            _HF_ATTENTION + "k_proj.weight": ("keys", "hidden"),
            _HF_ATTENTION + "v_proj.weight": ("keys", "hidden"),
        },
        ShardRule.GROUPS,
        product=True,
    ),
    Row(
        (_ATTENTION + "linear_proj.weight",),
        {_HF_ATTENTION + "o_proj.weight": ("hidden", "queries")},
        ShardRule.COLUMNS,
        product=True,
    ),
    Row(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        {_HF + "post_attention_layernorm.weight": ("hidden",)},
        ShardRule.WHOLE,
    ),
    Row(
        ("decoder.final_layernorm.weight",),
        {"model.norm.weight": ("hidden",)},
        ShardRule.WHOLE,
    ),
)
_MLP = (
    Row(
        (_LAYER + "mlp.linear_fc1.weight",),
        {_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        ShardRule.ROWS,
        product=True,
    ),
    Row(
        (_LAYER + "mlp.linear_fc2.weight",),
        {_HF + "mlp.down_proj.weight": ("hidden", "ffn")},
        ShardRule.COLUMNS,
        product=True,
    ),
)
_MIXTURE = (
    Row((_LAYER + "mlp.router.weight",), {_HF + "mlp.gate.weight": ("experts", "hidden")}, ShardRule.WHOLE),
    Row(
        (_EXPERTS + "local_experts.{expert}.linear_fc1.weight", _EXPERTS + "linear_fc1.weight{expert}"),
        {_HF_EXPERT + "gate_proj.weight": ("ffn", "hidden"), _HF_EXPERT + "up_proj.weight": ("ffn", "hidden")},
        ShardRule.ROWS,
        product=True,
    ),
    Row(
        (_EXPERTS + "local_experts.{expert}.linear_fc2.weight", _EXPERTS + "linear_fc2.weight{expert}"),
        {_HF_EXPERT + "down_proj.weight": ("hidden", "ffn")},
        ShardRule.COLUMNS,
        product=True,
    ),
)
_QKV_BIAS = Row(
    (_ATTENTION + "linear_qkv.bias",),
    {
        _HF_ATTENTION + "q_proj.bias": ("queries",),
        _HF_ATTENTION + "k_proj.bias": ("keys",),
        _HF_ATTENTION + "v_proj.bias": ("keys",),
    },
    ShardRule.GROUPS,
)
_Q_NORM = Row((_ATTENTION + "q_layernorm.weight",), {_HF_ATTENTION + "q_norm.weight": ("head",)}, ShardRule.WHOLE)
_K_NORM = Row((_ATTENTION + "k_layernorm.weight",), {_HF_ATTENTION + "k_norm.weight": ("head",)}, ShardRule.WHOLE)
_HEAD = Row(("output_layer.weight",), {"lm_head.weight": ("vocabulary", "hidden")}, ShardRule.ROWS)
_TIED_HEAD = Row(
    ("output_layer.weight",), {"model.embed_tokens.weight": ("vocabulary", "hidden")}, ShardRule.ROWS, copy=True
)

FAMILIES: Mapping[Family, tuple[Row, ...]] = {
    "llama": (*_COMMON, *_MLP),
    "qwen2": (*_COMMON, *_MLP, _QKV_BIAS),
    "qwen3": (*_COMMON, *_MLP, _Q_NORM, _K_NORM),
    "qwen3_moe": (*_COMMON, *_MIXTURE, _Q_NORM, _K_NORM),
}
"""Rows of each family; the row of the output head is added in `entries`."""


def sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of the rows' dimensions by name."""
    return {
        "vocabulary": spec.vocabulary,
        "hidden": spec.hidden,
        "queries": spec.heads * spec.head_dim,
        "keys": spec.kv_heads * spec.head_dim,
        "head": spec.head_dim,
        "ffn": spec.ffn,
        "experts": 0 if spec.experts is None else spec.experts.count,
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, last) of the Hugging Face tensor `name` of shape `size`."""

    name: str
    size: tuple[int, ...]
    first: int
    last: int

    @property
    def elements(self) -> int:
        """Number of elements in these rows."""
        return (self.last - self.first) * prod(self.size[1:])

    @property
    def are_all(self) -> bool:
        """Whether these rows are the whole tensor."""
        return self.last - self.first == self.size[0]


@dataclass(frozen=True, slots=True)
class Entry:
    """A row for one layer, and one expert, of a model."""

    megatron: tuple[str, ...]
    """Possible names of the parameter, with numbers of the whole model."""
    hf: Mapping[str, tuple[int, ...]]
    """Hugging Face names and full shapes."""
    layout: ShardRule
    groups: int
    """Query groups (key/value heads) of the whole model."""
    layer: int | None
    """Number of the layer; None outside the layers."""
    expert: int | None
    """Number of the expert; None for parameters that all tokens use."""
    copy: bool
    """See `Row.copy`."""
    product: bool
    """See `Row.product`."""

    def piece(self, size: tuple[int, ...], rank: int, ranks: int) -> tuple[slice, ...]:
        """Return the index of a tensor-parallel rank's part in a Hugging Face tensor of shape `size`."""
        dim = self.layout.split_dim
        if dim is None:
            return tuple(slice(None) for _ in size)
        step = size[dim] // ranks  # without remainder: `ModelSpec.check_divisible`
        mine = slice(rank * step, (rank + 1) * step)
        return tuple(mine if index == dim else slice(None) for index in range(len(size)))

    def part_shape(self, size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor of shape `size`."""
        return tuple(n // ranks if dim == self.layout.split_dim else n for dim, n in enumerate(size))

    def parts(self, parameter: Tensor, ranks: int) -> list[Tensor]:
        """Return views of the parameter for each Hugging Face tensor, in order, with the shapes of `part_shape`.

        Parts that are interleaved by query group are [groups of the rank, rows of a group, ...].
        """
        if self.layout is ShardRule.GROUPS:
            widths = [size[0] // self.groups for size in self.hf.values()]
            grouped = parameter.view(self.groups // ranks, sum(widths), *parameter.shape[1:])
            return list(grouped.split(widths, dim=1))
        if self.layout is ShardRule.ROWS:
            return list(parameter.split([self.part_shape(size, ranks)[0] for size in self.hf.values()]))
        return [parameter]

    def split(self, limit: int | None) -> list[list[Rows]]:
        """Split the entry into groups of tensors that are sent together: all tensors, or single tensors in blocks of
        rows.

        Args:
            limit: largest number of elements in a group, unless a single row (of query, key and value: the rows of one
                query group) has more; None for no limit.
        """
        if limit is None or sum(map(prod, self.hf.values())) <= limit:
            return [[Rows(name, size, 0, size[0]) for name, size in self.hf.items()]]
        found = []
        for name, size in self.hf.items():
            unit = size[0] // self.groups if self.layout is ShardRule.GROUPS else 1
            step = unit * max(1, limit // (unit * prod(size[1:])))
            starts = range(0, size[0], step)
            found += [[Rows(name, size, first, min(first + step, size[0]))] for first in starts]
        return found


def entries(spec: ModelSpec) -> list[Entry]:
    """Return an entry for every parameter, layer by layer and expert by expert: the order of exports and pushes."""
    rows = (*FAMILIES[spec.family], _TIED_HEAD if spec.tied else _HEAD)
    size = sizes(spec)

    def make(row: Row, layer: int | None = None, expert: int | None = None) -> Entry:
        numbers = {"layer": layer, "expert": expert}
        hf = {name.format(**numbers): tuple(size[dim] for dim in dims) for name, dims in row.hf.items()}
        names = tuple(name.format(**numbers) for name in row.megatron)
        return Entry(names, hf, row.layout, spec.kv_heads, layer, expert, row.copy, row.product)

    def of_layer(row: Row, layer: int) -> Iterator[Entry]:
        if "{expert}" not in row.megatron[0]:
            yield make(row, layer)
        else:
            yield from (make(row, layer, expert) for expert in range(size["experts"]))

    once = [make(row) for row in rows if "{layer}" not in row.megatron[0]]
    layered = [row for row in rows if "{layer}" in row.megatron[0]]
    return once + [entry for layer in range(spec.layers) for row in layered for entry in of_layer(row, layer)]


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all Hugging Face tensors of the model, in the order of export."""
    return {name: size for entry in entries(spec) if not entry.copy for name, size in entry.hf.items()}


def hf_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the size of all Hugging Face tensors in bytes, at `itemsize` bytes per element."""
    return sum(prod(size) for size in hf_shapes(spec).values()) * itemsize


def plan_buckets(spec: ModelSpec, limit: int) -> list[list[Rows]]:
    """Plan the buckets of a push: whole tensors of the table, or a block of a parameter that is larger.

    Args:
        spec: the model.
        limit: largest number of elements in a bucket.
    """
    found: list[list[Rows]] = [[]]
    elements = 0
    for together in (group for entry in entries(spec) if not entry.copy for group in entry.split(limit)):
        size, is_block = sum(rows.elements for rows in together), not together[0].are_all
        if elements and (is_block or elements + size > limit):
            found.append([])
            elements = 0
        found[-1] += together
        elements = max(limit, size) if is_block else elements + size
    return found
