"""Cost of the rollout controller itself: a whole pool of trees whose ENGINE ANSWERS AND TOOLS ARE SIMULATED.

Trees, forks, the parsing of calls, decisions, records and accounting are real. Two costs are left out:

- HTTP, which the controller seconds of the runs with a real engine contain
- sending records and reports to the trainer: they are made and dropped, so their pickling, the sending thread and the
  memory of rank 0 are in no figure of `arpo bench rollout`
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.algorithms.branching import make_branch_policy
from arpo_megatron.bench.pools import PURPOSE, new_pool, start
from arpo_megatron.bench.simulated_tools import LATENCIES, SimulatedTools
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.affinity import EngineState
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.exchange import FirstTokens
from arpo_megatron.engine.request import Sampling
from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.monitor.profiler import peak_memory_gb
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role

SIZES = (2048, 8192, 32768)
"""Trajectories in flight from the start; forks add to them."""
ALGORITHM = AlgorithmConfig(group_size=16, initial_rollouts=8, entropy_tokens=4)
LIMITS = RolloutLimits(
    max_length=2048, max_response_tokens=1024, max_tool_calls=3, max_tool_tokens=32, tool_timeout_s=600.0
)
SEGMENT = 24
"""Tokens of a simulated segment; the last one is a tool call."""
ANSWER_S = 1.0


class SimulatedEngine(EngineClient):
    """An engine client that answers after a second without an engine."""

    def __init__(self, call: int) -> None:
        super().__init__("http://nowhere.invalid")
        self._call = call  # the token of a whole tool call
        self.most_in_flight = 0

    async def _exchange(
        self, engine: EngineState, body: Mapping[str, Any], key: str, first: FirstTokens | None = None
    ) -> dict[str, Any]:
        """Answer with `SEGMENT` tokens that end with a call, or fewer tokens if the limit is lower."""
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        count = min(body["sampling_params"]["max_new_tokens"], SEGMENT)
        if count:  # not a prefill
            await asyncio.sleep(ANSWER_S)
        called = count == SEGMENT
        prompt = len(body["input_ids"])
        meta = {
            "prompt_tokens": prompt,
            "cached_tokens": prompt - 1 if count else 0,
            "output_token_logprobs": [(-1.0,)] * count,
            META_KEY: [1.0] * count,
            "finish_reason": {"type": "stop", "matched": "</python>"} if called else {"type": "length"},
        }
        return {"output_ids": [20] * (count - 1) + [self._call if called else 20], "meta_info": meta}


@dataclass(frozen=True, slots=True)
class ControllerTimings:
    """CPU time and memory of a process with one number of concurrent trajectories."""

    concurrent: int
    """Most trajectories waiting for the engine at the same time."""
    trajectories: int
    segments: int
    """Number of MODEL segments."""
    cpu_ms_per_segment: float
    """CPU time of the process."""
    peak_gb: float
    """Peak memory of the process in 10^9 bytes."""


def bench_controller(model: Path) -> dict[str, Any]:
    """Measure each size in a separate process, which gives it its own peak memory."""
    rows = []
    for size in SIZES:
        command = [sys.executable, "-m", "arpo_megatron.bench.controller", str(model), str(size)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"controller, simulated engine answers and tools: {rows[-1]}", file=sys.stderr)
    return {
        "engine_answers": "simulated",
        "tools": "simulated",
        "left_out": "HTTP; sending records and reports to the trainer, and its memory for them",
        "sizes": rows,
        "cpu_ms_per_segment": rows[-1]["cpu_ms_per_segment"],
        "growth": rows[-1]["cpu_ms_per_segment"] / rows[0]["cpu_ms_per_segment"],
        "peak_gb": rows[-1]["peak_gb"],
    }


async def _measure(model: Path, size: int) -> ControllerTimings:
    codec = TokenizerCodec(model)
    policy = make_branch_policy(ALGORITHM, vocabulary_size=codec.vocabulary_size, seed=1)
    tools, engine = SimulatedTools(ANSWER_S, LATENCIES["lognormal"]), SimulatedEngine(codec.vocabulary_size - 1)
    pool = new_pool(engine, tools, codec, policy, 1)
    tasks = tuple(
        Task(f"task {n}", (), "", "math", f" w{n % 800} w1 w2") for n in range(size // ALGORITHM.initial_rollouts)
    )
    settings = RolloutSettings(ALGORITHM, ALGORITHM.group_size, Sampling(), LIMITS)
    before = time.process_time()
    pool.start(start(tasks, step=0, version=0, settings=settings))
    report = await pool.collect(CollectTrees(PURPOSE))
    segments = sum(segment.role is Role.MODEL for tree in report.trees for segment in tree.segments)
    cpu_s = time.process_time() - before
    trajectories = sum(len(tree.leaves()) for tree in report.trees)
    return ControllerTimings(engine.most_in_flight, trajectories, segments, 1e3 * cpu_s / segments, peak_memory_gb())


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_measure(Path(sys.argv[1]), int(sys.argv[2]))))))
