"""The actor's checkpoint: weights, moments, schedule and random generators, stored with Megatron's dist_checkpointing.

Saving has two halves. `snapshot`, a call of all ranks, copies the state to host memory and agrees on who writes what;
training waits for it alone. `TrainingSnapshot.write` writes this rank's part without communication, so it can run in
a thread.

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
from arpo_megatron.actor.restricted_load import RestrictedLoad, check_module_states, load_common

COMMON_FILE = "common.pt"
_METADATA_FILES = (".metadata", "metadata.json", COMMON_FILE)
FORM = {"non_homogeneous_layers": True}
"""Save layers one by one under their number in the whole model, regardless of pipeline stage and chunk."""


@dataclass(frozen=True, slots=True)
class TrainingSnapshot:
    """This rank's part of the training state at one moment, in host memory."""

    directory: Path
    """Destination; exists and is empty."""
    plan: Any
    """Plan of the shards that this rank writes."""
    planner: MCoreSavePlanner
    """Resolves the plan to tensors."""
    writer: FileSystemWriter
    """Writer of torch.distributed.checkpoint for the directory."""
    metadata: Any
    """Description of all ranks' parts; on rank 0 only."""
    common: dict[str, Any]
    """State that is not sharded; on rank 0 only."""

    def write(self) -> tuple[Any, list[Path]]:
        """Write this rank's part, in any thread.

        Returns:
            This rank's entry for `finish`, and the files written.
        """
        written = self.writer.write_data(self.plan, self.planner).value()
        return written, sorted({self.directory / each.storage_data.relative_path for each in written})

    def finish(self, written: list[Any]) -> list[Path]:
        """Write the files that join all ranks' parts and return them; only rank 0 calls it, with every rank's entry."""
        self.writer.finish(self.metadata, written)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
        torch.save(self.common, self.directory / COMMON_FILE)
        return [self.directory / name for name in _METADATA_FILES]


@dataclass(frozen=True, slots=True)
class WeightsOnly:
    """The weights of an actor as a state of their own, an eighth of a checkpoint, for exports."""

    chunks: list[Any]

    def snapshot(self, directory: Path) -> TrainingSnapshot:
        """Copy the weights to host memory; all ranks call it."""
        return _copy(directory, {**_weights(self.chunks), "layout": _layout()})


def snapshot(directory: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> TrainingSnapshot:
    """Copy the current state to host memory; all ranks call it.

    Args:
        directory: destination of `TrainingSnapshot.write`; it exists and is empty.
        chunks: the model chunks of this rank (several under a virtual pipeline).
        optimizer: the optimizer of those chunks.
        scheduler: the schedule of that optimizer.
    """
    template, _ = _template(chunks, optimizer, scheduler, with_rng=True)
    return _copy(directory, template)


def _copy(directory: Path, template: dict[str, Any]) -> TrainingSnapshot:
    sharded, common = save_preprocess(template)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    copies = {key: [_copy_to_host(base) for base in bases] for key, bases in by_key.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    writer = FileSystemWriter(directory, single_file_per_rank=True, per_thread_copy_ahead=0)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    is_zero = parallel.is_rank_zero()
    planner.set_up_planner(mcore_to_pyt_state_dict(copies, False), writer.storage_meta(), is_zero)
    writer.set_up_storage_writer(is_zero)
    plans = parallel.gather_objects(writer.prepare_local_plan(planner.create_local_plan()))
    metadata = None
    if is_zero:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    mine = parallel.broadcast_object(plans)[dist.get_rank()]
    return TrainingSnapshot(directory, planner.finish_plan(mine), planner, writer, metadata, common)


def load_training_state(directory: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Load a state saved in any layout, with or without the distributed optimizer.

    Random generators are restored only in the layout that they were saved in. Hyper-parameters stay those of
    `optimizer` and `scheduler`: a resumed run follows its config.

    Raises:
        UserError: the checkpoint holds objects that could run code.
    """
    same_layout = load_common(directory / COMMON_FILE)["layout"] == _layout()
    template, own = _template(chunks, optimizer, scheduler, with_rng=same_layout)
    state = dist_checkpointing.load(template, str(directory), RestrictedLoad())
    for index, chunk in enumerate(chunks):
        check_module_states(state[f"chunk{index}"], fp8=bool(chunk.config.fp8))
        chunk.load_state_dict(state[f"chunk{index}"])
    with torch.no_grad():
        for label, tensor in own.items():
            tensor.copy_(state["moments"][label].view(tensor.shape))
    optimizer_state.set_adam_steps(optimizer, state["adam_steps"])
    optimizer_state.sync_offloaded_state(optimizer)
    scheduler.num_steps = 0
    scheduler.step(state["updates"])
    if same_layout:
        _set_rng(state["rng"])


def _template(
    chunks: list[Any], optimizer: Any, scheduler: Any, *, with_rng: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the state to save or load, and the optimizer tensors that its "moments" are copied into."""
    weights = _weights(chunks)
    every = {f"{name}.{key}": base for name, part in weights.items() for key, base in part.items()}
    moments, own = optimizer_state.state_template(optimizer, every)
    state = {
        **weights,
        "moments": moments,
        "adam_steps": optimizer_state.adam_steps(optimizer),
        "updates": int(scheduler.num_steps),
        "layout": _layout(),
    }
    if with_rng:
        state["rng"] = ShardedObject("rng", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return state, own


def _weights(chunks: list[Any]) -> dict[str, Any]:
    return {f"chunk{index}": chunk.sharded_state_dict(metadata=dict(FORM)) for index, chunk in enumerate(chunks)}


def _copy_to_host(base: Any) -> Any:
    if not isinstance(base, ShardedTensor):
        return base  # an object: it is serialized below, in memory
    copied = torch.empty(base.data.shape, dtype=base.data.dtype, pin_memory=base.data.is_cuda)
    return replace(base, data=copied.copy_(base.data.detach(), non_blocking=True))


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
