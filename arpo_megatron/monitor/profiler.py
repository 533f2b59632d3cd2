"""Memory peaks of a rank, and a window of steps under torch's profiler."""

import resource
import threading
from pathlib import Path
from typing import Any

import torch


def peak_memory_gb() -> float:
    """Most memory in GB (10^9 bytes) that this rank has had: of the GPU by tensors, without one of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class StepProfiler:
    """Traces log-prob passes and updates of some steps.

    Inside the window every module's forward pass is a range with the name of its class (`TreeAttention`, `MLP`, ...);
    torch names the optimizer's step itself. Outside of it nothing is hooked, recorded or slowed.

    Args:
        window: first and last step, counted from 1; None: nothing is traced.
        folder: `rankN.json.gz` is written there, for chrome://tracing or Perfetto.
        rank: N.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path, rank: int = 0) -> None:
        self._window = window
        self._path = folder / f"rank{rank}.json.gz"
        self._running: Any = None
        self._hooks: list[Any] = []

    def before(self, step: int) -> None:
        """The compute of a step begins."""
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
        """A step is over; returns the trace if it was the last one of the window."""
        return self.close() if self._window is not None and step >= self._window[1] else None

    def close(self) -> Path | None:
        """End the trace early, where a run ends inside the window; returns it if there is one."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        running.stop()
        for hook in self._hooks:
            hook.remove()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or absent, like every file of a run; torch packs it only where its name ends so.
        partial = self._path.with_name("writing.tmp.gz")
        running.export_chrome_trace(str(partial))
        partial.replace(self._path)
        return self._path


def _name_modules() -> list[Any]:
    """Hooks that put every module's forward pass into a range with the name of its class."""
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
