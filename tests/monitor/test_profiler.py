"""The profiler traces the configured steps, names modules, and changes nothing else."""

import gzip
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as hooks

from arpo_megatron.monitor.profiler import StepProfiler


class NamedPart(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def hooked() -> int:
    return len(hooks._global_forward_pre_hooks) + len(hooks._global_forward_hooks)


def test_profiler_traces_the_window_and_leaves_no_hook(tmp_path: Path) -> None:
    profiler, part, before = StepProfiler((2, 3), tmp_path / "profile", rank=1), NamedPart(), hooked()
    traces = []
    for step in range(1, 6):
        profiler.before(step)
        assert (hooked() > before) == (step in (2, 3))
        part(torch.ones(2))
        traces.append(profiler.after(step))
    path = tmp_path / "profile" / "rank1.json.gz"
    assert traces == [None, None, path, None, None]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "NamedPart" and event["ph"] == "X" for event in events) == 2
    assert hooked() == before
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


def test_profiler_keeps_the_trace_of_a_run_that_ends_early(tmp_path: Path) -> None:
    profiler, before = StepProfiler((1, 9), tmp_path), hooked()
    profiler.before(1)
    NamedPart()(torch.ones(2))
    assert profiler.after(1) is None
    assert profiler.close() == tmp_path / "rank0.json.gz"
    assert profiler.close() is None
    assert hooked() == before


def test_profiler_does_nothing_without_a_window(tmp_path: Path) -> None:
    profiler, before = StepProfiler(None, tmp_path), hooked()
    profiler.before(1)
    assert hooked() == before
    assert profiler.after(1) is None and profiler.close() is None
    assert not list(tmp_path.iterdir())
