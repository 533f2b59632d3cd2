"""Memory peaks of a rank, and a window of steps under torch's profiler."""

import resource
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory_gb() -> float:
    """Most memory in GB (10^9 bytes) that this rank has had: of the GPU by tensors, without one of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class StepProfiler:
    """Traces log-prob passes and updates of some steps.

    Args:
        window: first and last step, counted from 1; None: nothing is traced.
        folder: `steps_A_to_B.json.gz` is written there, for chrome://tracing or Perfetto.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path) -> None:
        self._window = window
        self._folder = folder
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """The compute of a step begins."""
        if self._window is None or self._running is not None or not self._window[0] <= step <= self._window[1]:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._first = step
        self._running = profile(activities=activities, record_shapes=True)
        self._running.start()

    def after(self, step: int) -> Path | None:
        """A step is over; returns the trace if it was the last one of the window."""
        if self._running is None or self._window is None or step < self._window[1]:
            return None
        self._running.stop()
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"steps_{self._first}_to_{step}.json.gz"
        with suppress(FileNotFoundError):
            path.unlink()
        self._running.export_chrome_trace(str(path))
        self._running = None
        return path
