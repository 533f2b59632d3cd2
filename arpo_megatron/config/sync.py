"""Weight pushes from the trainer into the engines."""

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
    """Weights from the trainer into the engines."""

    transport: Literal["auto", "broadcast", "ipc", "disk"] = "auto"
    """`broadcast`: gloo, on GPUs NCCL. `ipc`: memory that trainer and engine share, CUDA's where they share a GPU.
    `disk`: files, for engines that no network joins with the trainer. `auto`: `ipc` on a shared GPU, else
    `broadcast`."""
    bucket_mb: Positive = 256
    """Tensors are gathered and sent in buckets; what a push takes on the trainer's first rank is twice so many MiB. A
    parameter that is larger comes in blocks of rows; with `ipc` the memory that is shared holds the largest tensor."""
    verify_every: NonNegative = 20
    """At an engine's first push and at every so many, checksums of sampled tensors are compared, and the probe that
    follows every push is a long one; 0: at the first alone."""
    directory: Path | None = None
    """With `disk`: where, under one name on all machines. None: in the run directory."""

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of tensors in a bucket: `bucket_mb` less the rest of what a push needs."""
        whole = self.bucket_mb * 2**20
        return whole - min(12 * 2**20, 3 * whole // 8)
