"""Tools that sleep and answer a constant: only their latency is of interest, and it is a function of seed and place."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from arpo_megatron.rollout.tools import ToolClient
from tools_sandbox.client import ToolAnswer

SLOW_SHARE, SLOW_FACTOR = 0.02, 20.0


def _heavy_tail(rng: np.random.Generator) -> float:
    slow = SLOW_FACTOR if rng.random() < SLOW_SHARE else 1.0
    return slow / (1 - SLOW_SHARE + SLOW_SHARE * SLOW_FACTOR)


LATENCIES: Mapping[str, Callable[[np.random.Generator], float]] = MappingProxyType(
    {
        "constant": lambda _rng: 1.0,
        "lognormal": lambda rng: float(np.exp(rng.normal() - 0.5)),
        "heavy_tail": _heavy_tail,
    }
)
"""Distributions with mean 1: always the same; log-normal with sigma 1; 2 % of the calls 20 times slower."""


class SimulatedTools(ToolClient):
    """Sleeps for `mean_s` times a draw of `latency`."""

    def __init__(self, mean_s: float, latency: Callable[[np.random.Generator], float]) -> None:
        super().__init__("http://nowhere.invalid")
        self._mean_s = mean_s
        self._latency = latency

    async def call(
        self, tool: str, arguments: dict[str, object], *, trajectory_id: str, timeout_s: float
    ) -> ToolAnswer:
        """The same for every call."""
        seconds = self.seconds(trajectory_id)
        await asyncio.sleep(seconds)
        return ToolAnswer("42", "ok", seconds, cached=False)

    def seconds(self, trajectory_id: str) -> float:
        """How long the call takes that this place in a tree makes."""
        words = np.frombuffer(hashlib.sha256(trajectory_id.encode()).digest(), np.uint32)
        return self._mean_s * self._latency(np.random.default_rng(words))
