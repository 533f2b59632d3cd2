"""Tools that sleep and answer a constant: only their latency is of interest.

It is a function of the task and of how many calls were made for it before. Ways of growing that are compared name the
places of a tree differently; as far as they make equally many calls for a task, these take equally long in all.
"""

import asyncio
import hashlib
from collections import Counter
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
    """Sleeps for `mean_s` times a draw of `latency`; to compare two ways of growing takes one for each of them."""

    def __init__(self, mean_s: float, latency: Callable[[np.random.Generator], float]) -> None:
        super().__init__("http://nowhere.invalid")
        self._mean_s = mean_s
        self._latency = latency
        self._calls: Counter[str] = Counter()  # of each task

    async def call(
        self,
        tool: str,
        arguments: dict[str, object],
        *,
        trajectory_id: str,
        timeout_s: float,
        on_retry: Callable[[], None] = lambda: None,
    ) -> ToolAnswer:
        """The same for every call. Its task is what comes before the first "/" of `trajectory_id`."""
        task = trajectory_id.partition("/")[0]
        seconds = self._mean_s * self._latency(_generator(task, self._calls[task]))
        self._calls[task] += 1
        await asyncio.sleep(seconds)
        return ToolAnswer("42", "ok", seconds, cached=False)


def _generator(task: str, number: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{task}/{number}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))
