"""Memory peak of a rank, and a trace of some steps with torch's profiler."""

import resource
import threading
from pathlib import Path
from typing import Any

import torch


def peak_memory_gb() -> float:
    """Return the peak memory of this rank in GB (10^9 bytes): tensors on the GPU, or the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class StepProfiler:
    """Traces log-prob passes and updates of some steps.

    Within the window every module's forward pass is a range named after its class (`TreeAttention`, `MLP`, ...); torch
    names the optimizer's step itself. Outside the window nothing is hooked or recorded.

    Args:
        window: first and last step, counted from 1; None: no trace.
        folder: directory of the trace `rankN.json.gz`, for chrome://tracing or Perfetto.
        rank: N.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path, rank: int = 0) -> None:
        self._window = window
        self._path = folder / f"rank{rank}.json.gz"
        self._running: Any = None
        self._hooks: list[Any] = []

    def before(self, step: int) -> None:
        """Start the trace if the window begins with this step."""
        if self._window is None or self._running is not None or not self._window[0] <= step <= self._window[1]:
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._hooks = _name_modules()
        self._running = profile(activities=activities, record_shapes=True)
        self._running.start()

    def after(self, step: int) -> Path | None:
        """Return the path of the trace if this step was the last one of the window."""
        return self.close() if self._window is not None and step >= self._window[1] else None

    def close(self) -> Path | None:
        """End the trace early if a run ends within the window; return its path if there is one."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        running.stop()
        for hook in self._hooks:
            hook.remove()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first, so that the file is never incomplete; torch compresses it by its suffix.
        partial = self._path.with_name("writing.tmp.gz")
        running.export_chrome_trace(str(partial))
        partial.replace(self._path)
        return self._path


def _name_modules() -> list[Any]:
    """Install hooks that put every module's forward pass into a range with the name of its class."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.profiler import record_function

    ranges = threading.local()  # recomputation runs modules in autograd's threads

    def enter(module: Any, arguments: Any) -> None:
        span = record_function(type(module).__name__)
        span.__enter__()
        ranges.__dict__.setdefault("open", []).append(span)

    def leave(module: Any, arguments: Any, output: Any) -> None:
        if spans := ranges.__dict__.get("open"):
            spans.pop().__exit__(None, None, None)

    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
