"""`python -m arpo_megatron.cluster.measure_node FOLDER GPUS`: one task of a measurement (`measure`).

All tasks send to the next node, copy between GPU and host, and write to FOLDER, each at the same time. Rank 0 prints
GB/s by key of the profile as JSON. A speed is that of the slowest task.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from arpo_megatron.hardware.environment import LOOPBACK_ENVIRONMENT
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.ports import free_ports, is_loopback
from arpo_megatron.utils.stores import tcp_store

GPU_BYTES, CPU_BYTES = 2**30, 2**25
"""Bytes that a task sends, copies and writes."""
REPEATS = 4
MEETING_S = 300.0
"""Time that tasks wait for each other, including the unpacking of an image."""


def main() -> None:
    """Measure, and print the result on rank 0."""
    folder, on_gpus = Path(sys.argv[1]), sys.argv[2] == "1"
    rank, count, local, nodes = (
        int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID", "STEP_NUM_NODES")
    )
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    _meet(folder, rank, count, on_gpus)
    size = GPU_BYTES if on_gpus else CPU_BYTES
    block = torch.ones(size, dtype=torch.uint8, device=device)
    found = {}
    if nodes > 1:
        found["network_gb_s"] = _speed(lambda: _send(block, rank, count, count // nodes), size)
    if on_gpus:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["host_copy_gb_s"] = _speed(lambda: _copy(block, host), size)
    data = bytes(size)
    found["filesystem_gb_s"] = count * _speed(lambda: _write(folder / f"{rank}.bytes", data), size)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


def _meet(folder: Path, rank: int, count: int, on_gpus: bool) -> None:
    """Join the process group of all tasks, at an address that rank 0 writes to the folder."""
    meeting = folder / "meeting.json"
    if rank == 0:
        address = _own_address()
        write_json(meeting, {"address": address, "port": free_ports(1, address)[0]})
    deadline = time.monotonic() + MEETING_S
    while not meeting.exists():
        if time.monotonic() > deadline:
            sys.exit(f"rank {rank} sees no {meeting}: set `runs` to a directory that all nodes share")
        time.sleep(0.2)
    where = json.loads(meeting.read_text())
    if is_loopback(where["address"]):
        os.environ.update(LOOPBACK_ENVIRONMENT)
    timeout = timedelta(seconds=MEETING_S)
    store = tcp_store(rank, count, where["address"], where["port"], timeout)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def _own_address() -> str:
    """Return the address of this node on the way to the machine that started srun."""
    target = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def _speed(act: Callable[[], None], size: int) -> float:
    """Return the GB/s of the slowest task, the mean over `REPEATS` after one that is not counted."""
    act()
    dist.barrier()
    started = time.monotonic()
    for _ in range(REPEATS):
        act()
    seconds = torch.tensor([time.monotonic() - started])
    if dist.get_backend() == "nccl":
        seconds = seconds.cuda()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return REPEATS * size / seconds.item() / 1e9


def _send(block: torch.Tensor, rank: int, count: int, each: int) -> None:
    """Send a block to the same place on the next node, and receive one from the node before."""
    received = torch.empty_like(block)
    partners = [
        dist.P2POp(dist.isend, block, (rank + each) % count),
        dist.P2POp(dist.irecv, received, (rank - each) % count),
    ]
    for request in dist.batch_isend_irecv(partners):
        request.wait()
    if block.is_cuda:
        torch.cuda.synchronize()


def _copy(block: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(block)
    torch.cuda.synchronize()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
