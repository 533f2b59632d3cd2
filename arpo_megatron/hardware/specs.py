"""Specs of GPU nodes: the manufacturers' peaks. `plan.timing` has the share of them that a job reaches."""

from collections.abc import Mapping
from dataclasses import dataclass

from arpo_megatron.errors import UserError

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Hardware:
    """A node and its network. Sizes are in bytes, speeds in bytes/s, one way for links."""

    name: str
    """Name of the GPU."""
    memory: float
    """Memory of a GPU that a process can allocate (nvidia-smi's total)."""
    memory_speed: float
    bf16_flops: float
    """FLOP/s of dense bfloat16 products."""
    fp8_flops: float
    """FLOP/s of dense FP8 products; the value for bfloat16 if the GPU has none."""
    fp8: bool
    """Whether the GPU has FP8 products."""
    gpus: int
    link: float
    """Speed from a GPU to the others of its node."""
    network: float
    """Speed from a GPU to other nodes."""
    host_link: float
    """Speed between a GPU and its host."""
    host_memory: float
    """Memory of a node."""
    host_memory_speed: float
    filesystem: float = 2 * GB
    """Speed at which all nodes together read and write a shared filesystem. Assumption."""

    @classmethod
    def named(cls, name: str) -> "Hardware":
        """Return the GPU with this name. Raises UserError if it is not in `GPUS`."""
        if name not in GPUS:
            raise UserError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
        return GPUS[name]


def _hopper(name: str, memory: float, memory_speed: float) -> Hardware:
    return Hardware(
        name=name,
        memory=memory,
        memory_speed=memory_speed,
        bf16_flops=989e12,
        fp8_flops=1979e12,
        fp8=True,
        gpus=8,
        link=450 * GB,
        network=50 * GB,
        host_link=55 * GB,
        host_memory=2000 * GB,
        host_memory_speed=600 * GB,
    )


GPUS: Mapping[str, Hardware] = {
    # NVIDIA H100 and H200 data sheets (SXM, without sparsity); DGX H100 user guide: eight GPUs, NVLink 4 with 900 GB/s
    # both ways, a 400 Gbit/s adapter a GPU, PCIe 5 x16, 2 TB in two sockets with eight channels of DDR5-4800.
    "h100-80": _hopper("h100-80", 79.6 * GIB, 3.35e12),
    "h200": _hopper("h200", 140.4 * GIB, 4.8e12),
    # NVIDIA A100 data sheet (SXM, 80 GB), DGX A100 user guide: NVLink 3, 200 Gbit/s a GPU, PCIe 4, 1 TB or 2 TB.
    "a100-80": Hardware(
        name="a100-80",
        memory=80.0 * GIB,
        memory_speed=2.039e12,
        bf16_flops=312e12,
        fp8_flops=312e12,
        fp8=False,
        gpus=8,
        link=300 * GB,
        network=25 * GB,
        host_link=25 * GB,
        host_memory=1000 * GB,
        host_memory_speed=380 * GB,
    ),
    # NVIDIA L40S data sheet: 48 GB, PCIe 4 x16 and no NVLink. Its nodes differ; this one has 100 Gbit/s for two GPUs.
    "l40s": Hardware(
        name="l40s",
        memory=44.9 * GIB,
        memory_speed=0.864e12,
        bf16_flops=362e12,
        fp8_flops=733e12,
        fp8=True,
        gpus=8,
        link=25 * GB,
        network=6.25 * GB,
        host_link=25 * GB,
        host_memory=1000 * GB,
        host_memory_speed=380 * GB,
    ),
}
"""Specs by the name for `--gpu`."""
