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

    transport: Literal["auto", "network", "ipc", "disk"] = "auto"
    """`ipc`: memory that a trainer rank shares with the engine ranks on its GPU, or on its machine without GPUs.
    `network`: messages to the engine ranks by NCCL, or by gloo without GPUs of their own. `disk`: files, for engines
    without a network to the trainer. `auto`: `ipc` if it reaches every engine rank, else `network`."""
    bucket_mib: Positive = 256
    """A process sends or receives at most this many MiB of weights at a time, and holds at most two such buckets. With
    FP8 engines a bucket holds at least 128 rows of each matrix."""
    verify_every: NonNegative = 1
    """At an engine's first push, after a failed push and at every n-th one, checksums of all weights are compared, and
    the probe that follows every push is a long one. 0: not at every n-th. Pushes without checksums rely on a short
    probe, which in bfloat16 and FP8 finds only faults that change log-probs more than rounding does."""
    directory: Path | None = None
    """With `disk`: a directory with the same path on all machines. None: the run directory."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes of tensors in a bucket: `bucket_mib` less what a push needs next to its buckets."""
        whole = self.bucket_mib * 2**20
        return whole - min(12 * 2**20, 3 * whole // 8)
