"""Run named measurements, and measure time and memory of the device."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.tree import RolloutTree

Figures = dict[str, Any]
Measurements = Mapping[str, Callable[[], Figures]]


def run_all(measurements: Measurements) -> Figures:
    """Run the measurements in order and return their figures by name.

    Each result is also printed to standard error as it arrives. An exception becomes the result `{"error": ...}`, so
    that it does not cost the other measurements.
    """
    results: Figures = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for name, measure in measurements.items():
        started = time.monotonic()
        try:
            figures = measure()
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:400]}
        results[name] = {**figures, "seconds": round(time.monotonic() - started, 2)}
        print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
    return results


def packed(trees: Sequence[RolloutTree], token_budget: int) -> list[TreePack]:
    """Pack trees with equal credits. Prompts are not shared, because flattened trajectories would form a tree again."""
    return pack_trees(trees, supervised_credit(trees), token_budget=token_budget, share_prompt=False)


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes on the device."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait until the GPU has done all queued work; return at once without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Free cached memory and start a new measurement of peak memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the peak memory of tensors since `reset_peak` in GiB; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0


def used_bytes() -> int:
    """Return the device memory that all processes use; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def quantiles(values: Any) -> Figures:
    """Return median, 90 % and 99 % quantile and maximum of the absolute values."""
    absolute = torch.as_tensor(values).double().abs()
    found = torch.quantile(absolute[: 1 << 24], torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64))
    p50, p90, p99 = (float(f"{value:.3e}") for value in found.tolist())
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(f"{float(absolute.max()):.3e}"), "n": len(absolute)}
