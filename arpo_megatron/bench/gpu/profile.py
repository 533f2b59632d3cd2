"""Where the time of a training step goes: kernels and groups of them, and when the device has nothing to do.

Read from the profiler's trace of one update behind two others (`monitor/profiler.py`), which is kept. The
profiler slows the process that launches kernels, so the step's time without it stands beside.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.bench.gpu.journal import Figures, Part, timed
from arpo_megatron.bench.gpu.update import Bench, packed, single_chain
from arpo_megatron.config import Fp8Recipe
from arpo_megatron.monitor.profiler import StepProfiler
from arpo_megatron.packing.flops import update_flops
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.plan.synthetic_trees import MIXES
from arpo_megatron.tree import RolloutTree

TOP = 10
NAME_LENGTH = 140
"""Of a kernel: templates' arguments take lines; kernels that differ behind this are one."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
GROUPS = {
    "communication": r"nccl",
    "copy": r"^mem(cpy|set)",
    "head": r"log_softmax|logsumexp|cross_entropy|embedding",
    "attention": r"flex_attention|flash_|fmha|mha_|softmax|scaled_dot_product",
    "product": r"gemm|nvjet|cutlass|matmul|::mm|::addmm|::linear|splitk|wgmma",
    "fp8 cast": r"cast|transpose|quantiz|amax|block_scaled|scale",
    "optimizer": r"adam|multi_tensor|l2norm|foreach",
    "norm": r"rmsnorm|layernorm|layer_norm|rms_norm",
    "activation, rotation": r"swiglu|silu|rope|rotary|gated",
}
"""Kernels by name; the first that fits."""
GAP_US = 5.0
"""A pause of the device that counts as a gap."""


@dataclass(frozen=True, slots=True)
class Span:
    """What ran on the device, in microseconds."""

    name: str
    start: float
    microseconds: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.microseconds


def profile_parts(bench: Bench, out: Path) -> list[Part]:
    """The steps of `arpo bench gpu update` with the most to say; `out` takes the traces."""

    def part(recipe: Fp8Recipe, name: str, budget: int) -> Part:
        tree = single_chain(budget) if name == "flat" else MIXES[name].tree(0, bench.spec.vocabulary)
        title = f"{recipe} {name} {budget}"
        return Part(title, partial(_prepare, bench, recipe, budget, tree, out / title.replace(" ", "_")))

    return [
        part("none", "reasoning", 8192),
        part("none", "flat", 8192),
        part("blockwise", "reasoning", 8192),
        part("blockwise", "flat", 8192),
    ]


def _prepare(bench: Bench, recipe: Fp8Recipe, budget: int, tree: RolloutTree, folder: Path) -> Callable[[], Figures]:
    bench.config(recipe, "none")
    packs = packed([tree], budget)
    for pack in packs:
        flex_plan(pack.subtree_end, np.arange(pack.inherited, len(pack.subtree_end)))
    return partial(_measure, bench, recipe, packs, folder)


def _measure(bench: Bench, recipe: Fp8Recipe, packs: list[TreePack], folder: Path) -> Figures:
    actor = bench.actor(recipe, "none")
    update = partial(actor.update, packs, None)
    update()  # compiles
    without = median(timed(update) for _ in range(bench.repeats))
    profiler = StepProfiler((1, 1), folder)
    profiler.before(1)
    with_it = timed(update)
    trace = profiler.after(1)
    assert trace is not None
    flops = update_flops(bench.spec, packs).model_update
    return {
        "step_s": round(without, 4),
        "profiled_s": round(with_it, 4),
        "mfu": round(flops / without / bench.peak_flops(), 4),
        "trace": str(trace),
        "trace_mb": round(trace.stat().st_size / 1e6, 1),
        **account(device_spans(trace), step_us=1e6 * without),
    }


def device_spans(trace: Path) -> list[Span]:
    """Kernels and copies of a trace by their beginning; on a CPU its outermost operators, of which each runs others."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    found = [event for event in whole if event.get("cat") in ON_DEVICE]
    if not found:
        found = list(_outermost(event for event in whole if event.get("cat") == "cpu_op"))
    spans = [Span(str(event["name"]), float(event["ts"]), float(event["dur"])) for event in found]
    return sorted(spans, key=lambda span: span.start)


def _outermost(events: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], float("-inf")):
            ends[event["tid"]] = event["ts"] + event["dur"]
            yield event


def account(spans: list[Span], *, step_us: float) -> Figures:
    """Shares of the device's busy time, and of the step in which it was not busy.

    Args:
        spans: by their beginning; streams may overlap.
        step_us: of the step without the profiler: more idle time than that leaves is the profiler's own.
    """
    if not spans:
        return {"kernels": 0}
    names: defaultdict[str, float] = defaultdict(float)
    groups: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for span in spans:
        name = span.name[:NAME_LENGTH]
        names[name] += span.microseconds
        groups[group_of(span.name)] += span.microseconds
        calls[name] += 1
    total = sum(names.values())
    busy, gaps, end = 0.0, [], spans[0].start
    for span in spans:
        if span.start > end:
            gaps.append(span.start - end)
        busy += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    length = end - spans[0].start
    wide = [gap for gap in gaps if gap >= GAP_US]
    return {
        "kernels": len(spans),
        "busy_s": round(busy / 1e6, 4),
        "idle_share_profiled": round(1 - busy / length, 4) if length else 0.0,
        "idle_share": round(max(0.0, 1 - busy / step_us), 4),
        "gaps": {
            "count": len(wide),
            "s": round(sum(wide) / 1e6, 4),
            "longest_ms": round(max(gaps, default=0) / 1e3, 3),
        },
        "groups": {name: round(us / total, 4) for name, us in _largest(groups)},
        "top": [
            {"kernel": name, "share": round(us / total, 4), "ms": round(us / 1e3, 3), "calls": calls[name]}
            for name, us in _largest(names)[:TOP]
        ],
    }


def group_of(name: str) -> str:
    """The group that a kernel's name belongs to."""
    lower = name.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, lower)), "other")


def _largest(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])
