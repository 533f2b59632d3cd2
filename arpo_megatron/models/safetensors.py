"""Read and write safetensors files in pieces.

The format is a length (8 bytes, little endian), a JSON header of names, dtypes, shapes and byte ranges, and the data.
The safetensors package maps whole files into memory, so every page read stays with the process, and it writes from a
dictionary of whole tensors. Here a rank holds only the piece it reads and the tensor it writes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from arpo_megatron.errors import UserError

Shape = tuple[int, ...]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BLOCK_BYTES = 2 * 2**20
"""Size of the blocks in which whole rows are read if only some columns are needed."""
_LARGEST_HEADER = 100_000_000
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a tensor in an open file: offset and size in bytes, name of the dtype, and shape."""

    file: BinaryIO
    offset: int
    size: int
    dtype: str
    shape: Shape


class TensorFiles:
    """The safetensors of a model directory, one file or several with an index; a context manager.

    Raises:
        UserError: the directory has no safetensors, or a listed file is missing or damaged.
    """

    names: dict[str, Path]
    """The file of every tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._headers: dict[Path, dict[str, TensorLocation]] = {}
        self.names = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def check(self, tensors: Mapping[str, Shape]) -> None:
        """Check names, shapes and dtypes without reading a tensor.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsupported dtype.
        """
        for name, shape in tensors.items():
            location = self._locate(name)
            if location.shape != shape:
                raise UserError(
                    f"{self.path}: tensor {name} has shape {list(location.shape)}, but config.json gives {list(shape)}"
                )
            if location.dtype not in _DTYPES:
                kinds = ", ".join(_DTYPES)
                raise UserError(
                    f"{self.path}: tensor {name} is stored as {location.dtype}, which is not supported ({kinds} are)"
                )

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor that `check` has passed, to the CPU; only rows inside the part are read."""
        location = self._locate(name)
        rows, *columns = (range(*part.indices(size)) for part, size in zip(index, location.shape, strict=True))
        dtype, width = _DTYPES[location.dtype], location.shape[1:]
        row_bytes = prod(width) * dtype.itemsize
        kept = [slice(part.start, part.stop) for part in columns]
        if all(len(part) == size for part, size in zip(columns, width, strict=True)):
            part = torch.empty(len(rows), *width, dtype=dtype)
            self._fill(part, location, rows.start * row_bytes)
            return part
        part = torch.empty(len(rows), *(len(column) for column in columns), dtype=dtype)
        step = max(1, _BLOCK_BYTES // row_bytes)
        block = torch.empty(min(step, len(rows)), *width, dtype=dtype)
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            self._fill(block[:count], location, (rows.start + start) * row_bytes)
            part[start : start + count] = block[:count][(slice(None), *kept)]
        return part

    def sampled_digest(self) -> str:
        """Return the SHA-256 of every tensor's name, dtype and shape and of `_SAMPLE_BYTES` at its start, middle and
        end.

        It is cheap for any model (7 MB are read for 14 billion parameters), and any training changes it. An edit of a
        single row may go unnoticed.
        """
        digest = hashlib.sha256()
        for name in sorted(self.names):
            location = self._locate(name)
            digest.update(json.dumps([name, location.dtype, location.shape]).encode())
            rest = max(0, location.size - _SAMPLE_BYTES)
            for start in sorted({0, rest // 2, rest}):
                count = min(_SAMPLE_BYTES, location.size - start)
                digest.update(os.pread(location.file.fileno(), count, location.offset + start))
        return digest.hexdigest()

    def _fill(self, tensor: Tensor, location: TensorLocation, start: int) -> None:
        """Read bytes of the tensor's data, from `start`, into a contiguous tensor."""
        left, offset = _bytes(tensor), location.offset + start
        while left:
            count = os.preadv(location.file.fileno(), [left], offset)
            if not count:
                raise UserError(f"{location.file.name} is damaged: it ends before its last tensor")
            left, offset = left[count:], offset + count

    def _locate(self, name: str) -> TensorLocation:
        if name not in self.names:
            raise UserError(f"{self.path}: tensor {name} is missing")
        file = self.names[name]
        locations = self._header(file)
        if name not in locations:
            raise UserError(f"the index names {file} for tensor {name}, but the file does not hold it")
        return locations[name]

    def _index(self) -> dict[str, Path]:
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory: model.path must be a Hugging Face model directory")
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            try:
                return {name: self.path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is damaged: {error!r}") from None
        single = self.path / "model.safetensors"
        if not single.exists():
            raise UserError(
                f"{self.path} has neither model.safetensors nor {index.name}: other formats are not supported"
            )
        return dict.fromkeys(self._header(single), single)

    def _header(self, file: Path) -> dict[str, TensorLocation]:
        if file not in self._headers:
            try:
                opened = self._stack.enter_context(file.open("rb"))
            except FileNotFoundError:
                raise UserError(f"{file} is missing, although the index lists it") from None
            try:
                self._headers[file] = _parse_header(opened)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{file} is damaged: {error}") from None
        return self._headers[file]


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    directory: Path,
    max_shard_bytes: int,
) -> None:
    """Write safetensors files, with an index if there are several, from tensors that come one by one.

    Args:
        tensors: all of `shapes`, in that order, of dtype `dtype`, on any device; consumed to the end.
        shapes: names and shapes, needed first because they are the head of a file.
        dtype: dtype of all tensors.
        directory: an existing directory without such files.
        max_shard_bytes: largest size of a file's data; a larger tensor has its own file.

    Raises:
        RuntimeError: a tensor is not the expected next one.
    """
    coming = iter(tensors)
    sizes = {name: prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    groups = list(_group_by_size(sizes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        with (directory / file).open("wb") as out:
            out.write(_make_header({name: (shapes[name], dtype) for name in names}))
            for name in names:
                _write_next(coming, out, name, shapes[name], dtype)
    if (extra := next(coming, None)) is not None:
        raise RuntimeError(f"tensor {extra[0]} was not expected")
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write one safetensors file of contiguous tensors of any supported dtypes."""
    with path.open("wb") as out:
        out.write(_make_header({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}))
        for _, tensor in tensors:
            out.write(_bytes(tensor.detach().cpu()))


def write_rows(path: Path, name: str, shape: Shape, rows: Tensor, first: int) -> None:
    """Write one safetensors file with one tensor, one block of rows per call; the block with `first` = 0 starts the
    file."""
    with path.open("ab" if first else "wb") as out:
        if not first:
            out.write(_make_header({name: (shape, rows.dtype)}))
        out.write(_bytes(rows.detach().cpu()))


def _write_next(
    coming: Iterator[tuple[str, Tensor]], out: BinaryIO, name: str, shape: Shape, dtype: torch.dtype
) -> None:
    found, tensor = next(coming, ("nothing", torch.empty(0)))
    if (found, tuple(tensor.shape), tensor.dtype) != (name, shape, dtype):
        raise RuntimeError(f"expected {name} {shape} {dtype}, got {found} {tuple(tensor.shape)} {tensor.dtype}")
    out.write(_bytes(tensor.detach().cpu().contiguous()))


def _group_by_size(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield consecutive names whose sizes together stay within the limit; a larger tensor is alone."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _make_header(tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _parse_header(file: BinaryIO) -> dict[str, TensorLocation]:
    """Parse the header; ValueError, KeyError, TypeError or AttributeError if the file is not a safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _LARGEST_HEADER:
        raise ValueError(f"its header cannot be {length} bytes long")
    start, size = 8 + length, os.fstat(file.fileno()).st_size
    locations = {}
    for name, entry in json.loads(file.read(length)).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        known = _DTYPES.get(dtype)
        if known is not None and last - first != prod(shape) * known.itemsize:
            raise ValueError(f"tensor {name} of shape {list(shape)} cannot take {last - first} bytes")
        if first < 0 or start + last > size:
            raise ValueError(f"it ends before its tensor {name}")
        locations[name] = TensorLocation(file, start + first, last - first, dtype, shape)
    return locations


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
