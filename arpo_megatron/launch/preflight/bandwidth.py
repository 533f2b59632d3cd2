"""Speeds that a job's preflight measures: the network between its nodes, and the disk for its checkpoints.

Ranks of a process group measure the network together: an all-reduce over all of them, then exchanges between nodes in
pairs. A slow node is slow with every partner; its partners are fast with another.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.launch.preflight.check import CheckResult, failure, ok

GPU_BYTES, CPU_BYTES = 2**30, 2**22
"""Bytes of the all-reduce and of an exchange, per rank."""
DISK_BYTES = 2**30
"""Bytes that all nodes together write."""
NODE_DISK_BYTES = 2**28
"""Largest part of `DISK_BYTES` for one node."""
REPEATS = 3
SLOW_SHARE = 0.5
"""A node below this share of the median of all nodes is slow."""
EXPECTED_SHARE = 0.25
"""If the median of the nodes is below this share of the expected speed, they do not use their fast network. One
Ethernet card of 100 Gbit/s has 0.03 of the speed of eight InfiniBand cards of 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class NetworkSpeeds:
    """Result of `measure_network`, the same on every rank."""

    all_reduce_gb_s: float
    """GB/s that a rank sends during the all-reduce (bytes times 2 (n - 1) / n, over seconds)."""
    node_gb_s: tuple[float, ...]
    """GB/s that each node sends to its faster partner, with all its ranks at once; empty for one node."""


def measure_network(nodes: int, ranks_per_node: int, device: str) -> NetworkSpeeds:
    """Measure with all ranks of the process group, which are numbered node by node.

    Args:
        nodes: number of nodes.
        ranks_per_node: ranks of each node.
        device: "cpu", or the GPU of this rank.
    """
    import torch
    import torch.distributed as dist

    rank, count = dist.get_rank(), dist.get_world_size()
    size = CPU_BYTES if device == "cpu" else GPU_BYTES
    block = torch.zeros(size // 4, device=device)

    def seconds(act: Callable[[], None]) -> float:
        act()  # connects
        dist.barrier()
        started = time.monotonic()
        for _ in range(REPEATS):
            act()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.monotonic() - started) / REPEATS

    elapsed = seconds(lambda: dist.all_reduce(block))
    received = torch.empty_like(block)
    own = []
    for pairs in pair_nodes(nodes):
        partners = dict(pairs) | {b: a for a, b in pairs}
        partner = partners.get(rank // ranks_per_node)
        other = None if partner is None else partner * ranks_per_node + rank % ranks_per_node

        def exchange(other: int | None = other) -> None:
            if other is not None:
                sends = [dist.P2POp(dist.isend, block, other), dist.P2POp(dist.irecv, received, other)]
                for request in dist.batch_isend_irecv(sends):
                    request.wait()

        took = seconds(exchange)
        own.append(0.0 if other is None else size / took / 1e9)
    table = torch.zeros(count, len(own) + 1, device=device)
    table[rank] = torch.tensor([size * 2 * (count - 1) / count / elapsed / 1e9, *own])
    dist.all_reduce(table)
    rows = table.cpu()
    by_node = rows[:, 1:].view(nodes, ranks_per_node, -1).sum(1)
    return NetworkSpeeds(rows[:, 0].min().item(), tuple(by_node.amax(1).tolist()) if own else ())


def pair_nodes(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which each node meets its two neighbours in a ring (one for two nodes)."""
    if nodes < 2:
        return []
    if nodes == 2:
        return [[(0, 1)]]
    first = [(node, node + 1) for node in range(0, nodes - 1, 2)]
    second = [(node, (node + 1) % nodes) for node in range(1, nodes - nodes % 2, 2)]
    return [first, second] if nodes % 2 == 0 else [first, second, [(nodes - 1, 0)]]


def judge_network(
    names: Sequence[str], speeds: NetworkSpeeds, expected_gb_s: float | None
) -> list[tuple[str, CheckResult]]:
    """Return the results for all nodes.

    Args:
        names: names of the nodes.
        speeds: what they reached.
        expected_gb_s: GB/s that a node should send to another; None: CPUs, which are only reported.
    """
    text = f"all-reduce: {speeds.all_reduce_gb_s:.3g} GB/s per rank"
    if not speeds.node_gb_s:
        return [("all nodes", ok("bandwidth", text))]
    median = statistics.median(speeds.node_gb_s)
    text += f"; to another node: median {median:.3g} GB/s per node, slowest {min(speeds.node_gb_s):.3g}"
    found = [("all nodes", ok("bandwidth", text))]
    if expected_gb_s is None:
        return found
    if median < EXPECTED_SHARE * expected_gb_s:
        text += f", expected {expected_gb_s:.3g}: NCCL uses TCP or a wrong interface"
        fix = (
            "look at its log with NCCL_DEBUG=INFO under `environment`, or set network_gb_s to what the network reaches"
        )
        return [("all nodes", failure("bandwidth", text, fix))]
    for name, speed in zip(names, speeds.node_gb_s, strict=True):
        if speed < SLOW_SHARE * median:
            text = f"{speed:.3g} GB/s to other nodes, the median is {median:.3g}"
            found.append((name, failure("bandwidth", text, f"leave it out (`sbatch: {{exclude: {name}}}`), report it")))
    return found


def write_speed(folder: Path, size: int) -> float:
    """Write `size` bytes to a file in `folder`, flush and remove it; return GB/s. Raises OSError."""
    path, block = folder / f".speed-{os.getpid()}-{os.urandom(4).hex()}", os.urandom(2**20)
    try:
        started = time.monotonic()
        with path.open("wb") as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.monotonic() - started) / 1e9
    finally:
        path.unlink(missing_ok=True)
