"""Benchmark of search and its cache: ``python -m tools_sandbox.bench.search --passages 100000``.

The corpus is generated: passages of 100 words, drawn by Zipf's law from 200,000 words. One run measures executed
searches, the same searches from the cache, and requests that do nothing (GET /health), which shows the cost of HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import requests

from tools_sandbox.bench.service import service
from tools_sandbox.client import SandboxClient
from tools_sandbox.utils.yaml import yaml_text

_VOCABULARY = 200_000
_WORDS = 100
_WARM_UP = 50


def bench_search(passages: int = 100_000, queries: int = 1000, folder: Path | None = None) -> dict[str, Any]:
    """Build an index, serve it and search. Times are in seconds (build) and milliseconds (requests), memory in MB.

    folder: parent folder of corpus and index (about 2.5 kB per passage together). None: the temporary directory.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        corpus, config = root / "corpus.jsonl", root / "config.yaml"
        _write_corpus(corpus, passages)
        search = {"sources": [{"path": str(corpus), "format": "jsonl"}], "index_path": str(root / "index")}
        config.write_text(yaml_text({"search": search}))
        build_s, used = _build(config)
        index_bytes = sum(path.stat().st_size for path in (root / "index").rglob("*") if path.is_file())
        with service({"search": search}) as running, SandboxClient(running.url) as client:
            asked = _queries(queries + _WARM_UP)
            for query in asked[:_WARM_UP]:
                client.call("search", {"query": query})
            executed = _times_ms(asked[_WARM_UP:], lambda query: client.call("search", {"query": query}).cached, False)
            cached = _times_ms(asked[_WARM_UP:], lambda query: client.call("search", {"query": query}).cached, True)
            with requests.Session() as session:
                floor = _times_ms(asked[_WARM_UP:], lambda _: session.get(f"{running.url}/health", timeout=10).ok, True)
    return {
        "passages": passages,
        "build_s": round(build_s, 1),
        "build_cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "build_peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "index_mb": round(index_bytes / 1e6),
        "search_ms": executed,
        "cache_hit_ms": cached,
        "empty_request_ms": floor,
        "cache_hit_over_search": round(cached["p50"] / executed["p50"], 3),
    }


def _build(config: Path) -> tuple[float, resource.struct_rusage]:
    """Build the index in a separate process. Return the seconds and the resources that it used."""
    command = [sys.executable, "-m", "tools_sandbox.search.index", "--config", str(config)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=2)
    _, status, used = os.wait4(process.pid, 0)  # not RUSAGE_CHILDREN, which sums over all children
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"building the index ended with exit code {process.returncode}")
    return time.monotonic() - began, used


def _write_corpus(path: Path, passages: int) -> None:
    draw = random.Random(1)
    words = [f"w{number}" for number in range(_VOCABULARY)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(_VOCABULARY)))
    with path.open("w") as file:
        for _ in range(passages):
            file.write(json.dumps({"text": " ".join(draw.choices(words, cum_weights=weights, k=_WORDS))}) + "\n")


def _queries(count: int) -> list[str]:
    """Return queries of four words each, one common and three rare, like questions about names."""
    draw = random.Random(2)
    return [
        " ".join([f"w{draw.randrange(100)}", *(f"w{draw.randrange(100, _VOCABULARY // 4)}" for _ in range(3))])
        for _ in range(count)
    ]


def _times_ms(queries: list[str], ask: Callable[[str], bool], expected: bool) -> dict[str, float]:
    times = list[float]()
    for query in queries:
        began = time.perf_counter()
        result = ask(query)
        times.append((time.perf_counter() - began) * 1000)
        assert result == expected, "the cache did not behave as this measurement needs"
    times.sort()
    return {"p50": round(times[len(times) // 2], 3), "p99": round(times[len(times) * 99 // 100], 3)}


def main() -> None:
    """Run the benchmark with the command line's arguments and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tools_sandbox.bench.search", description=__doc__.split("\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="parent folder of corpus and index")
    arguments = parser.parse_args()
    print(json.dumps(bench_search(arguments.passages, arguments.queries, arguments.directory)))


if __name__ == "__main__":
    main()
