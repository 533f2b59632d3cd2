"""`python -m arpo_megatron.cluster.measure_node FOLDER GPUS`: one task of a measurement (`measure`).

All tasks send to other nodes, copy between GPU and host, and write to FOLDER, each at the same time. Rank 0 prints GB/s
by key of the profile as JSON. A speed is that of the slowest node or task.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from arpo_megatron.hardware.environment import LOOPBACK_ENVIRONMENT
from arpo_megatron.launch.preflight.bandwidth import measure_network, write_speed
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.ports import free_ports, is_loopback
from arpo_megatron.utils.stores import tcp_store

GPU_BYTES, CPU_BYTES = 2**30, 2**25
"""Bytes that a task copies and writes."""
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
    found = {}
    if nodes > 1:
        each = count // nodes
        found["network_gb_s"] = min(measure_network(nodes, each, str(device)).node_gb_s) / each
    if on_gpus:
        found["host_copy_gb_s"] = _slowest(_copy_speed(device), device)
    dist.barrier()
    found["filesystem_gb_s"] = count * _slowest(write_speed(folder, GPU_BYTES if on_gpus else CPU_BYTES), device)
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


def _slowest(gb_s: float, device: torch.device) -> float:
    """Return the speed of the slowest task."""
    speed = torch.tensor([gb_s], device=device)
    dist.all_reduce(speed, dist.ReduceOp.MIN)
    return speed.item()


def _copy_speed(device: torch.device) -> float:
    """Return the GB/s from GPU to host, the mean over `REPEATS` after one that is not counted."""
    block = torch.ones(GPU_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(GPU_BYTES, dtype=torch.uint8, pin_memory=True)
    host.copy_(block)
    dist.barrier()
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(REPEATS):
        host.copy_(block)
    torch.cuda.synchronize()
    return REPEATS * GPU_BYTES / (time.monotonic() - started) / 1e9


if __name__ == "__main__":
    main()
