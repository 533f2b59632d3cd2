"""Benchmark of python calls: an isolated call compared with the cold interpreter that it replaces.

`python -m tools_sandbox.bench.python` prints one JSON object. `arpo bench sandbox` runs it too.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from tools_sandbox.bench.service import service
from tools_sandbox.client import AsyncSandboxClient
from tools_sandbox.python_tool.protocol import THREAD_VARIABLES

_CODE = "import numpy, sympy\nprint(int(numpy.arange(10).sum()), sympy.factorint(360))"
_ANSWER = "45 {2: 3, 3: 2, 5: 1}"
_WARM_PER_COLD = 20
GOALS = {"latency_ratio": 30.0, "throughput_ratio": 20.0}
"""Figures that a quiet machine should reach."""

Call = Callable[[], Awaitable[None]]


def bench_python(cold_calls: int = 20, in_flight: int = 8) -> dict[str, object]:
    """Measure the python tool of a new service over HTTP, and `python3 -c`, alternately in one run.

    cold_calls: number of cold starts; the service gets 20 calls for each. in_flight: concurrency for the throughput.
    latency_ratio: cold p50 / warm p50, one call at a time. throughput_ratio: calls per second, warm / cold.
    Raises RuntimeError if an answer was wrong or the service did not start.
    """
    return asyncio.run(_bench(cold_calls, in_flight))


async def _bench(cold_calls: int, in_flight: int) -> dict[str, object]:
    config: dict[str, object] = {"python": {"preload": ["numpy", "sympy"]}, "max_concurrency": 64}
    with service(config) as running:
        isolation = running.isolation()
        async with AsyncSandboxClient(running.url) as client:
            figures = await _measure(client, cold_calls, in_flight)
    return {"isolation": isolation, **figures}


async def _measure(client: AsyncSandboxClient, cold_calls: int, in_flight: int) -> dict[str, object]:
    async def warm() -> None:
        answer = await client.call("python", {"code": _CODE})
        _check(answer.text)

    await warm()
    await _cold()
    cold_s: list[float] = []
    warm_s: list[float] = []
    for _ in range(cold_calls):  # alternately, so that other load on the machine affects both
        cold_s.append(await _timed(_cold))
        warm_s += [await _timed(warm) for _ in range(_WARM_PER_COLD)]
    cold_rate, warm_rate = 0.0, 0.0
    for _ in range(2):
        cold_rate += await _rate(_cold, cold_calls, in_flight) / 2
        warm_rate += await _rate(warm, cold_calls * _WARM_PER_COLD, in_flight) / 2
    cold_ms, warm_ms = statistics.median(cold_s) * 1e3, statistics.median(warm_s) * 1e3
    return {
        "user": "root" if os.getuid() == 0 else "ordinary",
        "cpus": len(os.sched_getaffinity(0)),
        "latency_ratio": round(cold_ms / warm_ms, 1),
        "throughput_ratio": round(warm_rate / cold_rate, 1),
        "cold_p50_ms": round(cold_ms, 1),
        "warm_p50_ms": round(warm_ms, 2),
        "warm_p99_ms": round(statistics.quantiles(warm_s, n=100)[98] * 1e3, 2),
        "cold_calls_per_s": round(cold_rate, 1),
        "warm_calls_per_s": round(warm_rate, 1),
        "in_flight": in_flight,
    }


async def _cold() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CODE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
    )
    output, _ = await process.communicate()
    _check(output.decode().strip())


def _check(answer: str) -> None:
    if answer != _ANSWER:
        raise RuntimeError(f"wrong answer: {answer[:500]!r}")


async def _timed(call: Call) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def _rate(call: Call, calls: int, in_flight: int) -> float:
    """Return the calls per second with `in_flight` calls at a time."""
    left = iter(range(calls))

    async def lane() -> None:
        for _ in left:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(in_flight)))
    return calls / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(bench_python()))
