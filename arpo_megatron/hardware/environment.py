"""Environment variables of a job's processes, by the device on which they compute."""

import os
from pathlib import Path

from arpo_megatron.config import Platform
from arpo_megatron.hardware.transformer_engine import EMULATION_VARIABLE

WAITING_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Makes waiting OpenMP threads sleep. Threads that spin take a core that another process needs."""
KERNEL_CACHE_ENVIRONMENT = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Bounds torch's and oneDNN's caches of compiled products. Each keeps 1024 by default, one for every shape, and packs
differ in length in every step: a trainer grew by megabytes per step. Both must be bounded, since each keeps a product
that the other has dropped. A step uses the same few dozen shapes in all layers."""
CPU_ENVIRONMENT = {
    **WAITING_ENVIRONMENT,
    **KERNEL_CACHE_ENVIRONMENT,
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
}
"""For processes that compute on a CPU: they leave any GPU alone. Without TorchDynamo they start a second faster,
because Megatron does not prepare its decorated functions for a compiler that no CPU layout calls."""

LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For processes whose peers are all on this machine. Without it the sockets of gloo and NCCL, which ask for no
password, listen on the network."""

_IMPORT_WARNINGS = "ignore:Transformer Engine and Apex are not installed,ignore:Apex is not installed"
"""Filters of warnings that Megatron-Core prints on import. They would hide the cause of a failure in a short log."""


NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables that SGLang sets in its processes if they are unset. All members of a group must agree on them."""


def _kernel_cache() -> dict[str, str]:
    """Return the variable for compiled kernels: a folder of the user's home, which later jobs and other nodes read too.

    torch's own choice is a folder in /tmp, which a node may empty after each job. A user's choice stands.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    parent = home if home.exists() else home.parent
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ or not os.access(parent, os.W_OK):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(home / "arpo_megatron" / "kernels")}


def process_environment(platform: Platform) -> dict[str, str]:
    """Return the variables for every process of a job that computes on `platform`."""
    if platform == "cpu":
        return CPU_ENVIRONMENT
    nccl = {name: os.environ.get(name, value) for name, value in NCCL_ENVIRONMENT.items()}
    return WAITING_ENVIRONMENT | KERNEL_CACHE_ENVIRONMENT | nccl  # `auto` may find no GPU


def trainer_environment(platform: Platform, *, emulate_te: bool = False) -> dict[str, str]:
    """Return `process_environment` plus the variables of trainer ranks, which may emulate Transformer Engine."""
    if emulate_te:  # a machine without GPU: nothing is compiled
        return {**CPU_ENVIRONMENT, "PYTHONWARNINGS": _IMPORT_WARNINGS, EMULATION_VARIABLE: "1"}
    environment = {**process_environment(platform), "PYTHONWARNINGS": _IMPORT_WARNINGS}
    if platform != "cpu":
        environment |= _kernel_cache()
        # One hardware queue keeps communication kernels in the order in which they were launched. Expandable segments
        # keep the allocator from fragmenting, because packs differ in length.
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return environment
