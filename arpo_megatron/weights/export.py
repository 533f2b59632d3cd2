"""Megatron's shards back into Hugging Face tensors, and into a directory that transformers and SGLang open."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor, nn

from arpo_megatron.weights.load import megatron_parameters
from arpo_megatron.weights.mapping import entries
from arpo_megatron.weights.shape import ModelShape

MAX_SHARD_BYTES = 5_000_000_000

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


def hf_tensors(model: nn.Module, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every full tensor under its Hugging Face name, in the parameters' type and on their device.

    A collective of each tensor-parallel group: every rank must run the iterator to its end, and every rank gets the
    same tensors. One parameter at a time is gathered. Tensors may share memory with the model: use or copy them before
    its next update.
    """
    parameters = megatron_parameters(model)
    for entry in entries(shape):
        shard = entry.parameter(parameters).detach()
        shards = [shard] if entry.layout.split_dim is None else _gather(shard)
        yield from entry.split(shards)


def export_hf(
    model: nn.Module, shape: ModelShape, source_dir: Path, out_dir: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `out_dir` as a Hugging Face directory: safetensors, config.json, generation config and tokenizer.

    A call of all ranks; rank 0 writes. The directory appears under its name when it is complete, replacing one that
    was there; an interrupted export leaves only `out_dir`.tmp, which the next one removes.

    Args:
        model: GPTModel of this shape, wrapped or not.
        shape: its shape.
        source_dir: Hugging Face directory that everything except the weights is copied from.
        out_dir: where to.
        max_shard_bytes: tensors are spread over files of at most this many bytes (a larger tensor has its own).
    """
    tensors = hf_tensors(model, shape)
    if dist.get_rank() == 0:
        _write(tensors, source_dir, out_dir, max_shard_bytes)
    else:
        for _ in tensors:  # take part in gathering
            pass
    dist.barrier()


def _gather(shard: Tensor) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, in rank order."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


def _write(tensors: Iterator[tuple[str, Tensor]], source_dir: Path, out_dir: Path, max_shard_bytes: int) -> None:
    temporary = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    dtype = _write_tensors(tensors, temporary, max_shard_bytes)
    config = json.loads((source_dir / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COPIED:
        if (source_dir / name).exists():
            shutil.copyfile(source_dir / name, temporary / name)
    for file in (*temporary.iterdir(), temporary):
        _sync(file)
    if out_dir.exists():
        old = out_dir.with_name(out_dir.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        out_dir.rename(old)
        temporary.rename(out_dir)
        shutil.rmtree(old)
    else:
        temporary.rename(out_dir)
    _sync(out_dir.parent)


def _write_tensors(tensors: Iterator[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> str:
    """Write the safetensors files and, for more than one, their index; returns the name of the tensors' type."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    dtype, total = "", 0

    def flush() -> None:
        save_file(held, directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(map(_bytes, held.values())) + _bytes(tensor) > max_shard_bytes:
            flush()
        # A copy: tensors may be views of one parameter, which safetensors would refuse to write.
        held[name] = tensor.to("cpu", copy=True)
        dtype, total = str(tensor.dtype).removeprefix("torch."), total + _bytes(tensor)
    flush()
    if len(shards) == 1:
        (directory / "0.part").rename(directory / "model.safetensors")
        return dtype
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.part").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
