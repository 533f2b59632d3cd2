"""Section `sync`: weight pushes from the trainer to the engines."""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    NonNegative,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class SyncConfig:
    """Weight pushes from the trainer to the engines."""

    transport: Literal["auto", "broadcast", "ipc", "disk"] = "auto"
    """`broadcast`: gloo, on GPUs NCCL. `ipc`: memory shared by trainer and engine, CUDA's if they share a GPU. `disk`:
    files, for engines without a network to the trainer. `auto`: `ipc` on a shared GPU, else `broadcast`."""
    bucket_mb: Positive = 256
    """Tensors are gathered and sent in buckets; a push needs twice this many MiB on the trainer's first rank. A larger
    parameter is sent in blocks of rows; with `ipc` the shared memory holds the largest tensor."""
    verify_every: NonNegative = 20
    """At an engine's first push and at every n-th, checksums of sampled tensors are compared, and the probe that
    follows every push is a long one; 0: only at the first."""
    directory: Path | None = None
    """With `disk`: a directory with the same path on all machines. None: the run directory."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes of tensors in a bucket: `bucket_mb` minus a push's overhead (docs/guides/engines-and-weights.md)."""
        whole = self.bucket_mb * 2**20
        return whole - min(12 * 2**20, 3 * whole // 8)
