"""Hugging Face safetensors into Megatron's shards. Every rank reads only its own part of every tensor."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from arpo_megatron.errors import UserError
from arpo_megatron.weights.mapping import entries
from arpo_megatron.weights.shape import ModelShape


class TensorFiles:
    """The safetensors of a model directory, one file or several under an index; a context manager.

    Attributes:
        names: every tensor and the file it is in.

    Raises:
        UserError: the directory has no safetensors, or one that is listed is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self.names = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def slices(self, name: str, shape: tuple[int, ...]) -> Any:
        """The tensor, unread: indexing it with slices reads that part.

        Raises:
            UserError: it is missing or of another shape.
        """
        if name not in self.names:
            raise UserError(f"{self.path}: tensor {name} is missing")
        found = self._file(self.names[name]).get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise UserError(
                f"{self.path}: tensor {name} has shape {found.get_shape()}, but config.json says {list(shape)}"
            )
        return found

    def _index(self) -> dict[str, Path]:
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory: model.path must be a Hugging Face model directory")
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return {name: self.path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = self.path / "model.safetensors"
        if not single.exists():
            raise UserError(f"{self.path} has neither model.safetensors nor {index.name}: other formats are not read")
        return dict.fromkeys(self._file(single).keys(), single)

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                opened = safe_open(file, framework="pt")
                self._open[file] = self._stack.enter_context(opened)
            except FileNotFoundError:
                raise UserError(f"{file} is missing, although the index lists it") from None
            except SafetensorError as error:
                raise UserError(f"{file} is damaged: {error}") from None
        return self._open[file]


def load_hf(model: nn.Module, shape: ModelShape, path: Path) -> None:
    """Fill `model` (a GPTModel of this shape, wrapped or not) from the Hugging Face directory `path`.

    Values are converted to the parameters' type. With a wrapped model, the optimizer's master weights are not touched:
    load before it is built.

    Raises:
        UserError: a tensor is missing, of another shape, or unknown to the family; files are missing or damaged.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    parameters = megatron_parameters(model)
    with TensorFiles(path) as files, torch.no_grad():
        table = entries(shape)
        _refuse_unknown(files, {name for entry in table for name in entry.hf} | _ignored(shape))
        for entry in table:
            pieces = [files.slices(name, size)[entry.piece(size, rank, ranks)] for name, size in entry.hf.items()]
            entry.parameter(parameters).copy_(entry.join(pieces, ranks))


def megatron_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The GPTModel's parameters by name, without the wrappers of data parallelism and mixed precision."""
    while "module" in dict(model.named_children()):
        model = model.module  # type: ignore[assignment]
    return dict(model.named_parameters())


def _ignored(shape: ModelShape) -> set[str]:
    """Tensors that may be there and say nothing: the copy of a tied head, frequencies that older checkpoints store."""
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(shape.layers)}
    return frequencies | ({"lm_head.weight"} if shape.tied else set())


def _refuse_unknown(files: TensorFiles, known: set[str]) -> None:
    if unknown := sorted(files.names.keys() - known):
        raise UserError(
            f"{files.path}: tensor {unknown[0]} (one of {len(unknown)}) does not belong to the architecture that "
            f"config.json names"
        )
