"""Process groups of the trainer: gloo on a CPU, NCCL on CUDA, with the groups of Megatron's parallel state.

Ranks come from the environment variables RANK, WORLD_SIZE, ..., which every launcher sets. Without them the process is
a world of one rank. Call `initialize` before building anything of Megatron.
"""

import logging
import os
import warnings
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from arpo_megatron.actor import cpu_platform
from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware import malloc
from arpo_megatron.hardware.environment import LOOPBACK_ENVIRONMENT
from arpo_megatron.hardware.numa import bind_to_gpu
from arpo_megatron.utils.heartbeat import beat
from arpo_megatron.utils.ports import is_loopback
from arpo_megatron.utils.stores import rank_store

Object = TypeVar("Object")

_RANK_ZERO = 0
_AFTER_HANG_S = 60.0
_groups: dict[str, Any] = {}
_board: Store = HashStore()
"""The points that ranks have reached (`post`). A lone process has it in its memory."""


def initialize(
    parallel: ParallelConfig, seed: int, *, timeout_s: float | None = None, idle_timeout_s: float = 86400.0
) -> None:
    """Join the process group, install the CPU platform layer if needed, and seed every random generator.

    Args:
        parallel: the layout; its `world_size` must equal the number of started ranks.
        seed: equal on all ranks; tensor-parallel ranks derive separate streams from it.
        timeout_s: deadline of one training collective in seconds; None: a minute after the supervisor has found the
            hang (`parallel.collective_timeout_s`), so that the ranks live to write their stacks.
        idle_timeout_s: deadline of `broadcast_object` in seconds. The other ranks wait in it while the controller
            collects trajectories, so it bounds the longest rollout.

    Raises:
        UserError: the number of ranks is not `parallel.world_size`, or megatron-core has an unchecked version.
    """
    timeout_s = parallel.collective_timeout_s + _AFTER_HANG_S if timeout_s is None else timeout_s
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != parallel.world_size:
        raise UserError(
            f"parallel: tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline} x data "
            f"{parallel.data} need {parallel.world_size} trainer ranks, but {world_size} started: start them with "
            f"python -m arpo_megatron.launch.ranks {parallel.world_size} MODULE"
        )
    silence_import_warnings()
    cpu_platform.install()
    from megatron.core import tensor_parallel

    global _board  # noqa: PLW0603 - belongs to the process group, which is global as well
    torch.set_num_threads(_threads())
    if not torch.cuda.is_available():
        malloc.keep()
    else:
        torch.cuda.set_device(device())
        bind_to_gpu(_pci_address())  # after the threads were counted
    if is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1")):
        os.environ.update(LOOPBACK_ENVIRONMENT)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=rank_store(rank(), world_size, timeout),
        rank=rank(),
        world_size=world_size,
        timeout=timeout,
    )
    _board = rank_store(rank(), world_size, timeout)
    create_groups(parallel, timeout_s=timeout_s)
    # Gloo on CUDA too: a rank that waits for the controller must not spin on its GPU.
    group("control", timeout_s=idle_timeout_s)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def create_groups(parallel: ParallelConfig, *, timeout_s: float = 1800.0) -> None:
    """Create Megatron's groups over the ranks of the process group."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )


def destroy() -> None:
    """Leave all process groups, if there are any."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    _groups.clear()


def device() -> torch.device:
    """Return the device of this rank's parameters."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def move(values: torch.Tensor, target: torch.device | str) -> torch.Tensor:
    """Copy a tensor of host memory to a device. The host does not wait for a copy to CUDA."""
    cuda = torch.device(target).type == "cuda"
    return (values.pin_memory() if cuda else values).to(target, non_blocking=cuda)


def is_rank_zero() -> bool:
    """Return whether this is rank 0, which runs the controller."""
    return rank() == _RANK_ZERO


def rank() -> int:
    """Return the index of this rank among all ranks."""
    return int(os.environ.get("RANK", "0"))


def group(name: str, *, timeout_s: float = 86400.0) -> Any:
    """Return the gloo group of all ranks with this name; None for a single process.

    All ranks must ask for it; the first request creates it. Threads can communicate concurrently on separate groups.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if name not in _groups:
        _groups[name] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _groups[name]


def broadcast_object(obj: Object | None, name: str = "control") -> Object:
    """Return rank 0's (picklable) object on every rank of `group(name)`; other ranks' arguments are ignored."""
    members = group(name)
    if members is None:
        return obj  # type: ignore[return-value]  # a lone process is the controller, whose object is one
    box = [obj if is_rank_zero() else None]
    dist.broadcast_object_list(box, src=_RANK_ZERO, group=members)
    beat()
    return box[0]  # type: ignore[return-value]  # the controller's by now


def gather_objects(obj: Object, name: str = "control") -> list[Object]:
    """Return every rank's (picklable) object, in the order of ranks, on every rank of `group(name)`."""
    members = group(name)
    if members is None:
        return [obj]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, obj, group=members)
    beat()
    return box


def post(name: str) -> None:
    """Let rank 0 know that this rank has reached the point `name`; waits for no other rank."""
    _board.set(f"{name}/{rank()}", "")


def ranks_without(name: str) -> list[int]:
    """Return the ranks that have not called `post(name)`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [each for each in range(ranks) if not _board.check([f"{name}/{each}"])]


def reduce_over_targets(values: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Combine `values` in place over the ranks that hold different targets; only the last pipeline stage has any."""
    from megatron.core import parallel_state

    for members in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        if members.size() > 1:
            dist.all_reduce(values, operation, group=members)
    return values


def _threads() -> int:
    """Return the machine's cores per local rank. The launcher's OMP_NUM_THREADS=1 is meant for GPU ranks."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def data_rank() -> int:
    """Return the index of this rank's model replica among the data-parallel ones."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


def _pci_address() -> str:
    """Return the PCI address of this rank's GPU, as 0000:3b:00.0; empty if torch does not know it."""
    gpu: Any = torch.cuda.get_device_properties(device())
    if not hasattr(gpu, "pci_bus_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def silence_import_warnings() -> None:
    """Silence warnings that Megatron prints on import about packages this project does not use."""
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
