"""Hugging Face safetensors into Megatron's shards. Every rank reads only its own part of every tensor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import nn

from arpo_megatron.models.check import check_tensors
from arpo_megatron.models.mapping import Entry, entries
from arpo_megatron.models.safetensors import TensorFiles
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.shards import LocalParameters


def load_hf(chunks: Sequence[nn.Module], spec: ModelSpec, path: Path) -> None:
    """Fill this rank's model from the Hugging Face directory `path`.

    Values are converted to the parameters' type. With a wrapped model, the optimizer's master weights are not touched:
    load before it is built. Besides the model, one piece of one tensor is in memory.

    Args:
        chunks: the rank's part of a model of this shape, wrapped or not: one GPTModel, or the several of an interleaved
            pipeline.
        spec: of the whole model.
        path: Hugging Face directory.

    Raises:
        UserError: a tensor is missing, of another shape, or unknown to the family; files are missing or damaged. All
            ranks look at all names and shapes, so that they agree.
    """
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    sparse = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    held = LocalParameters.of(chunks)
    left = set(held.parameters)
    with TensorFiles(path) as files, torch.no_grad():
        check_tensors(files, spec)
        for entry in entries(spec):
            if (found := held.find(entry)) is not None:
                name, parameter = found
                _fill(entry, parameter, files, *(dense if entry.expert is None else sparse))
                left.remove(name)
    if left:
        raise KeyError(f"the model has a parameter that no row of its family names: {min(left)}")


def _fill(entry: Entry, parameter: torch.Tensor, files: TensorFiles, rank: int, ranks: int) -> None:
    for part, (name, size) in zip(entry.parts(parameter, ranks), entry.hf.items(), strict=True):
        part.copy_(files.read(name, entry.piece(size, rank, ranks)).view(part.shape))
