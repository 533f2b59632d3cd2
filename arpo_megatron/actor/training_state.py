"""The actor's checkpoint: weights, moments, schedule and random generators, stored with Megatron's dist_checkpointing.

Saving has two halves. `snapshot`, a call of all ranks, copies the state to host memory and agrees on who writes what;
training waits for it alone. `Snapshot.write` writes this rank's part without communication, so it can run in a thread.

A thread replaces Megatron's asynchronous save, which forks a worker process: a fork must not touch CUDA and outlives a
killed rank. A thread dies with its rank, and its exception is raised at the next step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from arpo_megatron.actor import optimizer_state, parallel

_COMMON_FILE = "common.pt"
_METADATA_FILES = (".metadata", "metadata.json", _COMMON_FILE)
_FORM = {"non_homogeneous_layers": True}
"""Layers are saved one by one under their number in the whole model, whichever stage and chunk holds them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This rank's part of a state at one moment, in host memory.

    Attributes:
        directory: where it goes; exists and is empty.
        plan: what this rank writes.
        planner: resolves the plan to tensors.
        writer: torch's, of this directory.
        metadata: of all ranks' parts; on the controller.
        common: what is not sharded; on the controller.
    """

    directory: Path
    plan: Any
    planner: MCoreSavePlanner
    writer: FileSystemWriter
    metadata: Any
    common: dict[str, Any]

    def write(self) -> tuple[Any, list[Path]]:
        """Write this rank's part, in any thread.

        Returns:
            what the controller's `finish` needs of every rank, and the files written.
        """
        written = self.writer.write_data(self.plan, self.planner).value()
        return written, sorted({self.directory / each.storage_data.relative_path for each in written})

    def finish(self, written: list[Any]) -> list[Path]:
        """The files that join all ranks' parts; rank 0 alone calls it, with what each rank's `write` returned."""
        self.writer.finish(self.metadata, written)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
        torch.save(self.common, self.directory / _COMMON_FILE)
        return [self.directory / name for name in _METADATA_FILES]


def snapshot(directory: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> Snapshot:
    """Copy the state as it is now to host memory; a call of all ranks.

    Args:
        directory: where `Snapshot.write` will write; it exists and is empty.
        chunks: the model chunks of this rank (several under a virtual pipeline).
        optimizer: of those chunks.
        scheduler: of that optimizer.
    """
    template, _ = _template(chunks, optimizer, scheduler, with_rng=True)
    sharded, common = save_preprocess(template)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    copies = {key: [_copied(base) for base in bases] for key, bases in by_key.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    writer = FileSystemWriter(directory, single_file_per_rank=True, per_thread_copy_ahead=0)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    leader = parallel.is_rank_zero()
    planner.set_up_planner(mcore_to_pyt_state_dict(copies, False), writer.storage_meta(), leader)
    writer.set_up_storage_writer(leader)
    plans = parallel.gather_objects(writer.prepare_local_plan(planner.create_local_plan()))
    metadata = None
    if leader:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    mine = parallel.broadcast_object(plans)[dist.get_rank()]
    return Snapshot(directory, planner.finish_plan(mine), planner, writer, metadata, common)


def load_training_state(directory: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Continue from a state saved in any layout, with or without the distributed optimizer.

    Generators are restored only in the layout that they were saved in. Hyper-parameters stay those of `optimizer` and
    `scheduler`: a resumed run follows its configuration.
    """
    common = dist_checkpointing.load_common_state_dict(str(directory))
    same_layout = common["layout"] == _layout()
    template, own = _template(chunks, optimizer, scheduler, with_rng=same_layout)
    state = dist_checkpointing.load(template, str(directory))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"chunk{index}"])
    with torch.no_grad():
        for label, tensor in own.items():
            tensor.copy_(state["moments"][label].view(tensor.shape))
    optimizer_state.set_steps(optimizer, state["adam_steps"])
    optimizer_state.settle(optimizer)
    scheduler.num_steps = 0
    scheduler.step(state["updates"])
    if same_layout:
        _set_rng(state["rng"])


def _template(
    chunks: list[Any], optimizer: Any, scheduler: Any, *, with_rng: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is saved, and the optimizer's tensors that "moments" is loaded into."""
    weights = {f"chunk{index}": chunk.sharded_state_dict(metadata=dict(_FORM)) for index, chunk in enumerate(chunks)}
    every = {f"{name}.{key}": base for name, part in weights.items() for key, base in part.items()}
    moments, own = optimizer_state.template(optimizer, every)
    state = {
        **weights,
        "moments": moments,
        "adam_steps": optimizer_state.steps(optimizer),
        "updates": int(scheduler.num_steps),
        "layout": _layout(),
    }
    if with_rng:
        state["rng"] = ShardedObject("rng", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return state, own


def _copied(base: Any) -> Any:
    if not isinstance(base, ShardedTensor):
        return base  # an object: it is serialized below, in memory
    held = torch.empty(base.data.shape, dtype=base.data.dtype, pin_memory=base.data.is_cuda)
    return replace(base, data=held.copy_(base.data.detach(), non_blocking=True))


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _get_rng() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
