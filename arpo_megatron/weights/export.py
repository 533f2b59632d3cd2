"""Gather Megatron's shards into Hugging Face tensors, and write a directory that transformers and SGLang can load."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from arpo_megatron.hardware import malloc
from arpo_megatron.models.mapping import Entry, Rows, entries, hf_shapes, plan_buckets
from arpo_megatron.models.safetensors import write_tensors
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.utils.atomic import flush, replace_directory
from arpo_megatron.utils.heartbeat import beat
from arpo_megatron.weights.buckets import Bucket, RowBlock
from arpo_megatron.weights.shards import LocalParameters

MAX_SHARD_BYTES = 5_000_000_000
_BLOCK_BYTES = 2 * 2**20
"""Size of the blocks that tensor-parallel ranks send."""

_NO_FILES: Mapping[str, str] = MappingProxyType({})
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def hf_tensors(chunks: Sequence[nn.Module], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield every full tensor under its Hugging Face name, in the parameters' dtype and on their device.

    A collective: every rank must run the iterator to its end. Rank 0 gets the tensors, in the order of
    `mapping.hf_shapes`; the other ranks get nothing. One tensor is gathered at a time. Besides its share of the model,
    rank 0 holds at most one whole tensor and shards of it, any other rank at most two shards. Tensors may share memory
    with the model: use or copy them before its next update.

    Args:
        chunks: this rank's part of the model, wrapped or not (see `load_hf`).
        spec: the whole model.
    """
    return _gather(chunks, spec, None, limit=None)


def hf_buckets(chunks: Sequence[nn.Module], spec: ModelSpec, bucket_bytes: int) -> Iterator[Bucket]:
    """Yield the tensors of `hf_tensors` in buckets, each gathered when it is requested.

    A collective: every rank must run the iterator to its end; only rank 0 gets buckets. The tensors of one Megatron
    parameter, which SGLang fuses too (query, key and value; gate and up projection), share a bucket if they fit.
    Otherwise they come one after the other, and tensors larger than a bucket come in blocks of rows. Gathered tensors
    lie in two buffers that take turns: a bucket stays valid while the next one is gathered, and no longer.

    Args:
        chunks: this rank's part of the model.
        spec: the whole model.
        bucket_bytes: largest size of a bucket, unless a single row is larger.
    """
    pool = _BufferPool(bucket_bytes)
    limit = bucket_bytes // next(chunks[0].parameters()).dtype.itemsize
    tensors = _gather(chunks, spec, pool, limit=limit)
    if dist.get_rank():
        for _ in tensors:
            pass
        return
    for planned in plan_buckets(spec, limit):
        pool.turn()
        yield _bucket(list(islice(tensors, len(planned))), planned[0])
    for _ in tensors:  # run the code after the last tensor
        pass


def export_hf(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    source_dir: Path,
    out_dir: Path,
    *,
    files: Mapping[str, str] = _NO_FILES,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `out_dir` as a Hugging Face directory: safetensors, config.json, generation config and tokenizer.

    All ranks call it; rank 0 writes one tensor at a time. The directory is written as `out_dir`.tmp and renamed when it
    is complete, replacing an older one. The next export removes what a killed one left.

    Args:
        chunks: this rank's part of the model, wrapped or not (see `load_hf`).
        spec: the whole model.
        source_dir: Hugging Face directory that everything except the weights is copied from.
        out_dir: destination.
        files: contents of further files by name; they replace copied ones.
        max_shard_bytes: largest size of a file; a larger tensor has its own file.

    Raises:
        OSError: writing failed on rank 0, for example on a full disk; nothing is left behind.
    """
    malloc.give_back()  # training or loading has left holes too small for whole tensors
    tensors = hf_tensors(chunks, spec)
    if dist.get_rank() == 0:
        dtype = next(chunks[0].parameters()).dtype
        write_hf(tensors, spec, dtype, source_dir, out_dir, files=files, max_shard_bytes=max_shard_bytes)
    else:
        for _ in tensors:  # take part in gathering
            pass
    dist.barrier()


def write_hf(
    tensors: Iterator[tuple[str, Tensor]],
    spec: ModelSpec,
    dtype: torch.dtype,
    source_dir: Path,
    out_dir: Path,
    *,
    files: Mapping[str, str] = _NO_FILES,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `out_dir` from the whole model's tensors, in the order of `mapping.hf_shapes`, as `export_hf` describes.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
    temporary = out_dir.with_name(out_dir.name + ".tmp")
    try:
        _write(tensors, spec, dtype, source_dir, temporary, files, max_shard_bytes)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # free the disk
        raise
    replace_directory(temporary, out_dir)


def _gather(
    chunks: Sequence[nn.Module], spec: ModelSpec, pool: "_BufferPool | None", *, limit: int | None
) -> Iterator[tuple[str, Tensor]]:
    """Gather the parts of `Entry.split` of every entry into the pool's buffers, or into new memory without a pool."""
    local = LocalParameters.of(chunks)
    table = [entry for entry in entries(spec) if not entry.copy]
    stages = _stages(table, local)
    for entry, stage in zip(table, stages, strict=True):
        beat()
        found = local.find(entry)
        indices = {name: index for index, name in enumerate(entry.hf)}
        for rows in (rows for together in entry.split(limit) for rows in together):
            route = _Route(entry, spec, stage, rows, next(iter(local.parameters.values())), pool)
            part = None if found is None else entry.parts(found[1].detach(), route.ranks)[indices[rows.name]]
            whole = route.to_rank_zero(part)
            if whole is not None:
                yield rows.name, whole
            del part, whole  # otherwise they would live until the next ones are gathered


def _bucket(tensors: list[tuple[str, Tensor]], first: Rows) -> Bucket:
    return tensors if first.are_all else RowBlock(first.name, tensors[0][1], first.first, first.size[0])


class _BufferPool:
    """Buffers for whole tensors that take turns; a full buffer falls back to the allocator.

    The allocator alone would spread tensors of many sizes over more memory than is in use at a time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[Tensor | None] = [None, None]
        self._used = 0

    def turn(self) -> None:
        """Switch to the next buffer and empty it."""
        self._buffers.append(self._buffers.pop(0))
        self._used = 0

    def take(self, size: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of that shape, with dtype and device of `like`."""
        start, end = self._used, self._used + prod(size) * like.itemsize
        if end > self._size:
            return like.new_empty(tuple(size))
        if (buffer := self._buffers[0]) is None:
            buffer = self._buffers[0] = torch.empty(self._size, dtype=torch.uint8, device=like.device)
        self._used = end
        return buffer[start:end].view(like.dtype).view(tuple(size))


class _Route:
    """The way of a Hugging Face tensor, or of a block of its rows, to rank 0: expert ranks, then stages, then tensor
    ranks.

    Only the first data-parallel replica takes part, with the ranks that share out its experts; other replicas hold the
    same values.
    """

    def __init__(
        self, entry: Entry, spec: ModelSpec, stage: int, rows: Rows, like: Tensor, pool: _BufferPool | None
    ) -> None:
        self._entry, self._stage, self._rows, self._like = entry, stage, rows, like
        self._size = (rows.last - rows.first, *rows.size[1:])
        self._pool = None if dist.get_rank() else pool
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._expert_rank = 0
        if entry.expert is not None and spec.experts is not None:
            self.ranks = parallel_state.get_expert_tensor_parallel_world_size()
            self._rank = parallel_state.get_expert_tensor_parallel_rank()
            share = spec.experts.count // parallel_state.get_expert_model_parallel_world_size()
            self._expert_rank = entry.expert // share

    def to_rank_zero(self, part: Tensor | None) -> Tensor | None:
        """Return the whole tensor or block on rank 0, None elsewhere; `part` is this rank's part of the whole
        tensor."""
        part = None if part is None else self._requested(part)
        here, row = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        if self._expert_rank and here == self._stage and parallel_state.get_expert_data_parallel_rank() == 0:
            part = self._broadcast(part, parallel_state.get_expert_model_parallel_group(), self._expert_rank)
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) or row >= self.ranks:
            return None
        if self.ranks > 1 and self._entry.layout.split_dim is not None:
            return self._assemble(part, row, here)
        if self._stage:
            part = self._broadcast(part, parallel_state.get_pipeline_model_parallel_group(), self._stage)
        if here or row:
            return None
        assert part is not None, self._entry.megatron
        if part.is_contiguous():
            return part.view(self._size)
        whole = self._new(self._size)
        whole.view(part.shape).copy_(part)  # `part.reshape` would copy once more
        return whole

    def _assemble(self, part: Tensor | None, row: int, here: int) -> Tensor | None:
        """Assemble all rows on rank 0 from the parts of the tensor-parallel ranks of the stage that has them.

        It goes in blocks of rows, from stage to stage and then from rank to rank: a nearly full rank 0 has no room for
        a second tensor of this size, or for a part of one.
        """
        whole = None if row or here else self._new(self._size)
        others = self._entry.part_shape(self._size, self.ranks)[1:]
        step = max(1, _BLOCK_BYTES // (prod(others) * self._like.itemsize))
        received = self._like.new_empty(min(step, self._size[0]), *others)
        for rank in range(self.ranks):
            local = self._local_rows(rank)
            columns = self._entry.piece(self._rows.size, rank, self.ranks)[1:]
            target = None if whole is None else whole[(_relative(local, self._rows.first), *columns)]
            for start in range(0, len(local), step):
                rows = received[: min(step, len(local) - start)]
                if rank == row and here == self._stage:
                    assert part is not None, self._entry.megatron
                    rows = _rows(part, start, start + len(rows), grouped=part.dim() > len(self._size))
                if rank == row and self._stage:
                    group = parallel_state.get_pipeline_model_parallel_group()
                    dist.broadcast(rows, group=group, group_src=self._stage)
                if here == 0:
                    dist.broadcast(rows, group=parallel_state.get_tensor_model_parallel_group(), group_src=rank)
                if target is not None:
                    target[start : start + step].copy_(rows)
        return whole

    def _share(self, rank: int) -> range:
        """Rows of the whole tensor that a rank's part contains (whole or by columns)."""
        return range(self._rows.size[0])[self._entry.piece(self._rows.size, rank, self.ranks)[0]]

    def _local_rows(self, rank: int) -> range:
        """Requested rows that a rank's part contains."""
        share = self._share(rank)
        first = max(share.start, self._rows.first)
        return range(first, max(first, min(share.stop, self._rows.last)))

    def _requested(self, part: Tensor) -> Tensor:
        """Return the requested rows of this rank's part; interleaved rows come in whole groups (see `Entry.split`)."""
        rows, unit = _relative(self._local_rows(self._rank), self._share(self._rank).start), 1
        if part.dim() > len(self._size):
            unit = part.shape[1]
        return part[rows.start // unit : rows.stop // unit]

    def _new(self, size: tuple[int, ...]) -> Tensor:
        return self._like.new_empty(size) if self._pool is None else self._pool.take(size, self._like)

    def _broadcast(self, part: Tensor | None, group: dist.ProcessGroup, source: int) -> Tensor:
        """Broadcast the part of the group's rank `source`; other ranks' arguments are ignored."""
        if dist.get_rank(group) == source:
            assert part is not None, self._entry.megatron
            part = part.contiguous()
        else:
            part = self._new((len(self._local_rows(self._rank)), *self._entry.part_shape(self._size, self.ranks)[1:]))
        dist.broadcast(part, group=group, group_src=source)
        return part


def _relative(rows: range, start: int) -> slice:
    """Return rows as a slice counted from `start`."""
    return slice(rows.start - start, rows.stop - start)


def _rows(part: Tensor, start: int, stop: int, *, grouped: bool) -> Tensor:
    """Return rows of a part, contiguous; an interleaved part is [groups, rows of a group, ...]."""
    if not grouped:
        return part[start:stop].contiguous()
    width = part.shape[1]
    groups = part[start // width : -(-stop // width)].flatten(0, 1)
    return groups[start % width : start % width + stop - start]


def _stages(table: Sequence[Entry], local: LocalParameters) -> list[int]:
    """Return the pipeline rank that has each entry, directly or through its expert ranks."""
    mine = {index for index, entry in enumerate(table) if entry.layer in local.layers or local.find(entry) is not None}
    count = parallel_state.get_pipeline_model_parallel_world_size()
    everyones: list[set[int]] = [mine] * count
    if count > 1:
        dist.all_gather_object(everyones, mine, group=parallel_state.get_pipeline_model_parallel_group())
    return [next(stage for stage, indices in enumerate(everyones) if index in indices) for index in range(len(table))]


def _write(
    tensors: Iterator[tuple[str, Tensor]],
    spec: ModelSpec,
    dtype: torch.dtype,
    source_dir: Path,
    temporary: Path,
    files: Mapping[str, str],
    max_shard_bytes: int,
) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_tensors(tensors, hf_shapes(spec), dtype, temporary, max_shard_bytes)
    config = json.loads((source_dir / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COPIED:
        if (source_dir / name).exists():
            shutil.copyfile(source_dir / name, temporary / name)
    for name, text in files.items():
        (temporary / name).write_text(text, encoding="utf-8")
    for file in (*temporary.iterdir(), temporary):
        flush(file)
