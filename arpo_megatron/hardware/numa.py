"""NUMA: run a process on the CPUs next to its GPU, so that copies between host and GPU do not cross sockets.

Memory follows: Linux takes pages from the node of the CPU that first writes them.
"""

import os
from pathlib import Path

_SYSTEM = Path("/sys")


def bind_to_gpu(pci: str, system: Path = _SYSTEM) -> str:
    """Restrict this process to the CPUs of its GPU's NUMA node.

    Nothing changes if the kernel does not know the node, or if the process may use none of its CPUs (as under a cpuset
    of another node).

    Args:
        pci: address of the GPU, as 0000:3b:00.0.
        system: root of sysfs.

    Returns:
        A phrase for the log; empty if nothing changed.
    """
    node = numa_node(pci, system)
    if node is None:
        return ""
    allowed = os.sched_getaffinity(0)
    near = allowed & cpus_of(node, system)
    if not near or near == allowed:
        return ""
    os.sched_setaffinity(0, near)
    return f"NUMA node {node}, {len(near)} of {len(allowed)} CPUs"


def numa_node(pci: str, system: Path = _SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device; None if the kernel does not know it."""
    try:
        node = int((system / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int, system: Path = _SYSTEM) -> set[int]:
    """Return the CPUs of a NUMA node; none if there is no such node."""
    try:
        text = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
