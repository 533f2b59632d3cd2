"""Seconds of every rank, and ranks that are slower than the others (stragglers).

A rank's compute seconds are divided by the work of its packs: an unequal share of the work is not a slow rank. One step
may be slow by chance, so a straggler is one that was slow in several steps in a row.
"""

import json
import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo_megatron.utils.atomic import append_line

SLOW = 1.2
"""A rank that takes this many times the median seconds per work is slow."""
STEPS = 3
"""Steps in a row after which a slow rank is reported."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's times in a step."""

    node: str
    data_rank: int
    """Index of its model replica, whose packs it computes."""
    seconds: Mapping[str, float]
    """Wall seconds by phase, waits included."""
    compute_s: float
    """Seconds in passes, without waits for other replicas."""
    memory_gb: float
    """Most memory since its start, in 10^9 bytes."""


def own_node() -> str:
    """Return the name of this node, Slurm's if there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(slots=True)
class Stragglers:
    """Finds slow ranks from step to step, on rank 0."""

    path: Path
    """File that receives one row per step (JSONL)."""
    slow_since: dict[int, int] = field(default_factory=dict)
    """Number of steps in a row in which a rank was slow."""

    def add(self, step: int, ranks: Sequence[RankTimes], work: Sequence[float]) -> tuple[float | None, str]:
        """Record a step.

        Args:
            step: number of the step.
            ranks: times of all ranks, in their order.
            work: work of each model replica in the step, in any unit.

        Returns:
            The slowest rank's seconds per work over the median (None without passes), and a line for the user about
            ranks that have been slow for exactly `STEPS` steps (else "").
        """
        slowness = slowness_of(ranks, work)
        row: dict[str, Any] = {
            "step": step,
            "nodes": [rank.node for rank in ranks],
            "compute": [round(rank.compute_s, 3) for rank in ranks],
            "slowness": [round(value, 3) for value in slowness],
            "seconds": {
                name: [round(rank.seconds.get(name, 0.0), 3) for rank in ranks]
                for name in sorted({name for rank in ranks for name in rank.seconds})
            },
        }
        with suppress(OSError):  # a full disk must not end the run here
            append_line(self.path, json.dumps(row))
        slow = [rank for rank, value in enumerate(slowness) if value > SLOW]
        self.slow_since = {rank: self.slow_since.get(rank, 0) + 1 for rank in slow}
        named = [rank for rank, steps in self.slow_since.items() if steps == STEPS]
        text = ""
        if named:
            nodes = ", ".join(sorted({ranks[rank].node for rank in named}))
            most = max(slowness[rank] for rank in named)
            text = (
                f"rank {', '.join(map(str, named))} on {nodes} took up to {most:.2f} times the median seconds for its "
                f"work in each of the last {STEPS} steps: all ranks wait for it ({self.path.name})"
            )
        return max(slowness, default=None), text


def slowness_of(ranks: Sequence[RankTimes], work: Sequence[float]) -> list[float]:
    """Return each rank's compute seconds per work over the median of all ranks; 1 for a rank without work."""
    rates = [rank.compute_s / work[rank.data_rank] if work[rank.data_rank] else None for rank in ranks]
    known = [rate for rate in rates if rate]
    if not known:
        return []
    median = statistics.median(known)
    return [1.0 if not rate else rate / median for rate in rates]
