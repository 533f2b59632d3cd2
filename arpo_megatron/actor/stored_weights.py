"""The weights of a checkpoint as Hugging Face tensors, read by one process with the memory of one layer.

No optimizer, no GPU and no other rank is needed, whatever the layout that wrote the checkpoint. The model exists on
torch's `meta` device only: it gives the name of each weight in the checkpoint and its shape.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from arpo_megatron.actor.model import build_chunks
from arpo_megatron.actor.restricted_load import RestrictedLoad, load_common
from arpo_megatron.actor.training_state import COMMON_FILE, FORM
from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.mapping import Entry, entries
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.shards import LocalParameters


def stored_tensors(directory: Path, spec: ModelSpec, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a stored `Actor.snapshot` in the order of `mapping.hf_shapes`.

    Args:
        directory: directory of the snapshot.
        spec: the whole model.
        dtype: dtype of the stored weights.

    Raises:
        UserError: the checkpoint holds objects that could run code.
        RuntimeError: there are several ranks, or a GPU is visible, on which layers have other names.
    """
    if torch.cuda.is_available() or torch.distributed.get_world_size() > 1:
        raise RuntimeError("stored weights are read by one process without a GPU")
    load_common(directory / COMMON_FILE)  # refuses what Megatron would unpickle
    with torch.device("meta"):
        (model,) = build_chunks(spec, ParallelConfig(), dtype, initialize=False)
    local = LocalParameters.of([model])
    template = model.sharded_state_dict(metadata=dict(FORM))
    strategy = RestrictedLoad()
    for _, layer in groupby((entry for entry in entries(spec) if not entry.copy), key=lambda entry: entry.layer):
        names = {_name(entry, local): entry for entry in layer}
        wanted = {name: _in_memory(template[name]) for name in names}
        loaded = dist_checkpointing.load({"weights": wanted}, str(directory), strategy)["weights"]
        del wanted
        for name, entry in names.items():
            yield from _hf_tensors(entry, loaded.pop(name))


def _in_memory(base: Any) -> Any:
    return replace(base, data=torch.empty_like(base.data, device="cpu"))


def _name(entry: Entry, local: LocalParameters) -> str:
    found = local.find(entry)
    assert found is not None, entry.megatron
    return found[0]


def _hf_tensors(entry: Entry, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    for part, (name, size) in zip(entry.parts(weight, 1), entry.hf.items(), strict=True):
        yield name, part.reshape(size)
