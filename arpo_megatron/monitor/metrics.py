"""Metrics of a run: RUN_DIR/metrics.jsonl with one JSON object per step, and Weights & Biases if configured."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config
from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import append_line, atomic_write
from arpo_megatron.utils.code_version import code_version

Value = float | int | str | bool | None


class MetricsLog:
    """Appends the metrics of each step; a step appears once, also after interruptions.

    A resumed run repeats the steps after its last checkpoint; their first rows are replaced. The wandb run has one id,
    kept in RUN_DIR/wandb_run_id, so a resumed run continues the same curves. A row that the disk refuses is counted and
    lost: it must not end a run.

    Args:
        run_dir: the run directory, which exists.
        config: sets whether and how wandb is used; its values are logged there.
        phase: set for a cold start: the file is PHASE_metrics.jsonl, and wandb's curves are PHASE/... over PHASE/step.

    Raises:
        UserError: wandb cannot be started (no login in online mode, for example).
    """

    def __init__(self, run_dir: Path, config: JobConfig, phase: str = "") -> None:
        self._path = run_dir / (f"{phase}_metrics.jsonl" if phase else "metrics.jsonl")
        self._prefix = f"{phase}/" if phase else ""
        self._last_step = _repair(self._path)
        self._lost_rows = 0
        mode = config.monitor.wandb
        self._wandb = None if mode == "disabled" else _start_wandb(run_dir, config, mode, self._prefix)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row of one step, `row["step"]` from 1. Values are numbers or text; NaN and infinity become null."""
        plain = {key: _plain(value) for key, value in row.items()}
        step = int(row["step"])
        try:
            if step <= self._last_step:
                _keep_before(self._path, step)
            append_line(self._path, json.dumps(plain))
            self._last_step = step
        except OSError:
            self._lost_rows += 1
        if self._wandb is not None:
            self._wandb.log({self._prefix + key: value for key, value in plain.items()})

    @property
    def place(self) -> str:
        """Where wandb shows the run: its address, or the command that sends an offline run; empty without wandb."""
        if self._wandb is None:
            return ""
        return self._wandb.url or f"wandb sync {Path(self._wandb.dir).parent}"

    def close(self) -> int:
        """End the wandb run, if there is one. Return the number of rows that could not be written."""
        if self._wandb is not None:
            self._wandb.finish()
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
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _keep_before(path: Path, step: int) -> None:
    """Remove the rows of `step` and later; at any moment the file is the old or the new one."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with atomic_write(path) as partial:
        partial.write_text("".join(line for line in lines if json.loads(line)["step"] < step), encoding="utf-8")


def _start_wandb(run_dir: Path, config: JobConfig, mode: Literal["offline", "online"], prefix: str) -> Any:
    """Start the wandb run, or resume the one that an earlier part of this run has started."""
    import wandb

    id_file = run_dir / "wandb_run_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:8] + "\n")
    try:
        run = wandb.init(
            project=config.monitor.wandb_project,
            entity=config.monitor.wandb_entity,
            group=config.monitor.wandb_group,
            tags=config.monitor.wandb_tags,
            notes=config.monitor.wandb_notes,
            job_type="sft" if config.sft_only else "rl",
            name=run_dir.name,
            id=id_file.read_text().strip(),
            resume="allow",
            mode=mode,
            dir=run_dir,
            config=dump_config(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.errors.Error as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"monitor.wandb={mode}: {reason}; or use monitor.wandb=offline") from None
    origin = {"code": code_version(), "slurm_job_id": os.environ.get("SLURM_JOB_ID")}
    run.config.update(origin, allow_val_change=True)
    # A resumed run repeats steps. wandb drops repeated values of its own step counter, but not of a metric.
    run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
    return run
