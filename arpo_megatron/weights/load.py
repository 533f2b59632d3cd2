"""Load Hugging Face safetensors into Megatron's shards; every rank reads only its own part of every tensor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import nn

from arpo_megatron.models.check import check_tensors
from arpo_megatron.models.mapping import Entry, entries
from arpo_megatron.models.safetensors import TensorFiles
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.utils.heartbeat import beat
from arpo_megatron.weights.shards import LocalParameters


def load_hf(chunks: Sequence[nn.Module], spec: ModelSpec, path: Path) -> None:
    """Fill this rank's model from the Hugging Face directory `path`.

    Values are converted to the parameters' dtype. The optimizer's master weights are not touched, so load before
    building it. Besides the model, one part of one tensor is in memory.

    Args:
        chunks: this rank's part of the model, wrapped or not: one GPTModel, or several of an interleaved pipeline.
        spec: the whole model.
        path: Hugging Face directory.

    Raises:
        UserError: a tensor is missing, has another shape or is unknown to the family, or files are missing or damaged.
            All ranks check all names and shapes, so all of them raise.
        KeyError: the model has a parameter that the family's table does not name.
    """
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    sparse = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    local = LocalParameters.of(chunks)
    left = set(local.parameters)
    with TensorFiles(path) as files, torch.no_grad():
        check_tensors(files, spec)
        for entry in entries(spec):
            if (found := local.find(entry)) is not None:
                beat()
                name, parameter = found
                _fill(entry, parameter, files, *(dense if entry.expert is None else sparse))
                left.remove(name)
    if left:
        raise KeyError(f"the model has a parameter that no row of its family names: {min(left)}")


def _fill(entry: Entry, parameter: torch.Tensor, files: TensorFiles, rank: int, ranks: int) -> None:
    for part, (name, size) in zip(entry.parts(parameter, ranks), entry.hf.items(), strict=True):
        part.copy_(files.read(name, entry.piece(size, rank, ranks)).view(part.shape))
