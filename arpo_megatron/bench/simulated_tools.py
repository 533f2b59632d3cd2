"""Tools that sleep and answer a constant.

The latency depends on the task and on the number of its earlier calls. So schedules that make equally many calls for a
task wait equally long in total, whatever their order.
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
"""Distributions with mean 1: constant; log-normal with sigma 1; 2 % of the calls 20 times slower."""


class SimulatedTools(ToolClient):
    """Sleep for `mean_s` times a draw of `latency`, then answer `text`. Each schedule needs its own instance."""

    def __init__(self, mean_s: float, latency: Callable[[np.random.Generator], float], text: str = "42") -> None:
        super().__init__("http://nowhere.invalid")
        self._mean_s = mean_s
        self._latency = latency
        self._text = text
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
        """Return the same answer for every call. `trajectory_id` starts with the task and a "/"."""
        task = trajectory_id.partition("/")[0]
        seconds = self._mean_s * self._latency(_generator(task, self._calls[task]))
        self._calls[task] += 1
        await asyncio.sleep(seconds)
        return ToolAnswer(self._text, "ok", seconds, cached=False)


def _generator(task: str, number: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{task}/{number}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))
