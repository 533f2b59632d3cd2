"""Metrics of a run: RUN_DIR/metrics.jsonl with one JSON object per step, and other places that the config names."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.monitor.tensorboard import TensorBoardWriter
from arpo_megatron.monitor.wandb_run import WandbRun
from arpo_megatron.utils.atomic import append_line, atomic_write
from arpo_megatron.utils.json_lines import json_lines

Value = float | int | str | bool | None


class MetricsLog:
    """Appends the metrics of each step; a step appears once, also after interruptions.

    A resumed run repeats the steps after its last checkpoint; their first rows are replaced. A row that the disk
    refuses is counted and lost: it must not end a run.

    Args:
        run_dir: the run directory, which exists.
        config: section `monitor` sets where else the metrics go.
        phase: set for a cold start: the file is PHASE_metrics.jsonl, and the names elsewhere are PHASE/NAME.

    Raises:
        UserError: wandb cannot be started (no login in online mode, for example).
    """

    def __init__(self, run_dir: Path, config: JobConfig, phase: str = "") -> None:
        self._path = run_dir / (f"{phase}_metrics.jsonl" if phase else "metrics.jsonl")
        prefix, monitor = f"{phase}/" if phase else "", config.monitor
        self._last_step = _repair(self._path)
        self._lost_rows = 0
        self.wandb = None if monitor.wandb == "disabled" else WandbRun(run_dir, config, prefix)
        """The run in Weights & Biases, if there is one."""
        self._tensorboard = TensorBoardWriter(run_dir / "tensorboard", prefix) if monitor.tensorboard else None

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row of one step, `row["step"]` from 1, with the time as `time`.

        Values are numbers or text; NaN and infinity become null.
        """
        plain = {key: _plain(value) for key, value in row.items()}
        step = int(row["step"])
        try:
            if step <= self._last_step:
                _keep_before(self._path, step)
            append_line(self._path, json.dumps({**plain, "time": round(time.time(), 3)}))
            self._last_step = step
        except OSError:
            self._lost_rows += 1
        for tracker in (self.wandb, self._tensorboard):
            if tracker is not None:
                tracker.log(plain)

    def close(self) -> int:
        """End the runs elsewhere. Return the number of rows that could not be written."""
        for tracker in (self.wandb, self._tensorboard):
            if tracker is not None:
                tracker.close()
        return self._lost_rows


def _plain(value: Any) -> Value:
    """Return a JSON value: numpy scalars become Python numbers, NaN and infinities null."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, int | float | str | bool):
        return value
    raise TypeError(f"a metric is a number or text, not {type(value).__name__}")


def _repair(path: Path) -> int:
    """Cut off a half-written line of a crash. Return the step of the last whole row, or 0."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return max((_step(row) for _, row in json_lines(whole)), default=0)


def _keep_before(path: Path, step: int) -> None:
    """Remove the rows of `step` and later; at any moment the file is the old or the new one."""
    data = path.read_bytes()
    rows = zip(data.splitlines(keepends=True), json_lines(data), strict=False)
    with atomic_write(path) as partial:
        partial.write_bytes(b"".join(line for line, (_, row) in rows if _step(row) < step))


def _step(row: Mapping[str, Any] | None) -> int:
    """Return the step of a row; 0 for a damaged line, which stays where it is."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) else 0
