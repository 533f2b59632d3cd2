"""Checkpoints: the training state through Megatron's dist_checkpointing, in directories that are whole or absent."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from arpo_megatron.actor.optimizer import complete_state
from arpo_megatron.actor.parallel import is_leader

_STEP = re.compile(r"step_(\d+)")
_STATE_FILE = "state.json"
_ACTOR_DIRECTORY = "actor"


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's torch_dist format, written by the ranks themselves.

    Its own strategy writes through forked workers and a manager process that imports the main module anew: seconds at
    the first save of a small model, and one more process to outlive a crash.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards and, together, the metadata."""
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        save_state_dict(
            mcore_to_pyt_state_dict(sharded, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_training_state(directory: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Write weights, optimizer, schedule and generators, sharded over the ranks, to an existing empty directory."""
    template = _template(model, optimizer, scheduler, loading=False, with_rng=True)
    dist_checkpointing.save(template, str(directory), InProcessSave("torch_dist", 1))


def load_training_state(directory: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Inverse of `save_training_state`, resharding as needed.

    Generators are restored only in the layout that they were saved in. Hyper-parameters stay those of `optimizer` and
    `scheduler`: a resumed run follows its configuration.
    """
    common = dist_checkpointing.load_common_state_dict(str(directory))
    same_layout = common["layout"] == _layout()
    template = _template(model, optimizer, scheduler, loading=True, with_rng=same_layout)
    hyper = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = dist_checkpointing.load(template, str(directory))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    complete_state(optimizer)
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        group.update(values)
    scheduler.num_steps = 0
    scheduler.step(state["updates"])
    if same_layout:
        _set_rng(state["rng"])


def _template(model: Any, optimizer: Any, scheduler: Any, *, loading: bool, with_rng: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict()
    moments = optimizer.sharded_state_dict(weights, is_loading=loading)
    if isinstance(optimizer.optimizer, torch.optim.AdamW):
        # Megatron saves the steps of all parameters as one number, and leaves it out while it is 0.
        moments.get("optimizer", moments)["state"].setdefault("common_step", torch.zeros(()))
    state = {
        "model": weights,
        "optimizer": moments,
        "updates": int(scheduler.num_steps),
        "layout": _layout(),
    }
    if with_rng:
        tensor, data = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        state["rng"] = ShardedObject(
            "rng", _get_rng(), (parallel_state.get_tensor_model_parallel_world_size(),), (tensor,), replica_id=data
        )
    return state


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
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


class Saveable(Protocol):
    """An actor, as far as its checkpoint goes."""

    def save(self, directory: Path) -> None:
        """Write into an existing empty directory; all ranks call it."""


class CheckpointStore:
    """Whole checkpoints `root/step_N`; a directory of that name was written completely and flushed to disk.

    All ranks construct and call it alike, on a file system that they share.

    Args:
        root: made where it is missing; what an interrupted save left there is removed.
        keep: newest checkpoints kept.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep
        if is_leader():
            root.mkdir(parents=True, exist_ok=True)
            for stale in root.glob("*.tmp"):
                shutil.rmtree(stale)
        _barrier()

    def save(self, step: int, actor: Saveable, crash_state: dict[str, Any]) -> Path:
        """Write `step_N` and delete the oldest ones.

        Args:
            step: N; an older checkpoint of the same step is replaced.
            actor: the training state.
            crash_state: whatever else must survive a crash, JSON-safe; the leader's is written.

        Returns:
            the directory.
        """
        final = self.root / f"step_{step}"
        partial = final.with_name(final.name + ".tmp")
        if is_leader():
            (partial / _ACTOR_DIRECTORY).mkdir(parents=True)
        _barrier()
        actor.save(partial / _ACTOR_DIRECTORY)
        _barrier()
        if is_leader():
            (partial / _STATE_FILE).write_text(json.dumps(crash_state))
            _flush(partial)
            replaced = final.with_name(final.name + ".replaced.tmp")
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            _flush_directory(self.root)
            for old in [*self._all()[: -self.keep], replaced]:
                shutil.rmtree(old, ignore_errors=old is replaced)
        _barrier()
        return final

    def latest(self) -> Path | None:
        """The checkpoint of the highest step, None without any."""
        found = self._all()
        return found[-1] if found else None

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """The crash state of a checkpoint; a file is read on every rank."""
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())
        return state

    @staticmethod
    def actor_directory(path: Path) -> Path:
        """What `Actor.load` takes."""
        return path / _ACTOR_DIRECTORY

    def _all(self) -> list[Path]:
        steps = {int(m[1]): path for path in self.root.iterdir() if (m := _STEP.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps)]


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _flush(directory: Path) -> None:
    """Everything below `directory` to the disk, before the rename that makes it count."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_directory(path)
    _flush_directory(directory)


def _flush_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
