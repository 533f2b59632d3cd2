"""Memory of every process of a job, step by step: a process that grows without end ends a long run.

All processes of one program of the job count together, because pools of workers replace theirs.
A program is flat if its memory in the last third of the steps after warm-up exceeds that in the first third by no more
than `TOLERANCE` and `NOISE_BYTES`. Each third is represented by the median of its steps' peaks.
"""

import json
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.choose_run import next_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import run_job

TOLERANCE = 0.03
"""Growth that counts as flat, as a share of the memory after warm-up."""
NOISE_BYTES = 16 * 2**20
"""Growth that counts as flat whatever the memory."""
INTERVAL_S = 1.0
"""Seconds between two samples. Processes that live shorter may be missed."""

Samples = dict[str, dict[int, int]]
"""Resident bytes by program and step, the peak of each step."""


@dataclass(slots=True)
class MemoryWatch:
    """Samples the descendants of this process from a thread, while the block runs."""

    metrics: Path
    """metrics.jsonl of the run, whose rows count the finished steps."""
    samples: Samples = field(default_factory=lambda: defaultdict(dict))
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            step = finished_steps(self.metrics)
            if not step:
                continue  # the cold start and the start-up of services are not part of the loop
            for program, size in memory_by_program().items():
                self.samples[program][step] = max(size, self.samples[program].get(step, 0))


def memory_by_program() -> dict[str, int]:
    """Return the resident bytes of this process and its descendants, summed by program."""
    found: dict[str, int] = defaultdict(int)
    me = psutil.Process()
    found["command line"] = me.memory_info().rss
    for process in me.children(recursive=True):
        try:
            found[program_of(process.cmdline(), process.name())] += process.memory_info().rss
        except psutil.Error:  # it has ended meanwhile
            continue
    return dict(found)


def program_of(command: list[str], name: str) -> str:
    """Return the program of a process: its `-m` module, or else the name that it has given itself."""
    modules = [after for word, after in pairwise(command) if word == "-m"]
    return modules[0] if modules else name


def finished_steps(metrics: Path) -> int:
    """Return the number of rows in metrics.jsonl; 0 before the first."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def judge(samples: Samples, warm_up: int) -> dict[str, dict[str, Any]]:
    """Return for each program its memory in MiB before and after, its growth per step, and whether it is flat.

    Args:
        samples: resident bytes by program and step.
        warm_up: steps that are left out.

    Raises:
        ValueError: no program was seen in three steps after warm-up.
    """
    found = {}
    for program, by_step in samples.items():
        steps = sorted(step for step in by_step if step > warm_up)
        if len(steps) < 3:  # not a process of the loop
            continue
        third = len(steps) // 3
        first, last = steps[:third], steps[-third:]
        before, after = (median(by_step[step] for step in part) for part in (first, last))
        found[program] = {
            "before_mib": round(before / 2**20, 1),
            "after_mib": round(after / 2**20, 1),
            "mib_per_step": round((after - before) / 2**20 / (median(last) - median(first)), 3),
            "flat": after - before <= max(NOISE_BYTES, TOLERANCE * before),
        }
    if not found:
        raise ValueError("no process was seen in three steps after warm-up: use more steps")
    return found


def bench_soak(config: JobConfig, warm_up: int) -> dict[str, Any]:
    """Run a job to its end, and judge the memory of its processes.

    Raises:
        UserError: an input of the job is missing.
        ProcessDiedError: a process of the job died.
    """
    run = RunDirectory(next_path(config) if config.run_dir is None else config.run_dir)
    with MemoryWatch(run.path / "metrics.jsonl") as watch:
        run_job(replace(config, run_dir=run.path), resume=False)
    series = run.path / "memory.json"
    series.write_text(json.dumps(watch.samples))
    programs = judge(watch.samples, warm_up)
    return {
        "flat": all(row["flat"] for row in programs.values()),
        "steps": config.train.steps,
        "warm_up": warm_up,
        "programs": programs,
        "run_dir": str(run.path),
        "series": str(series),
    }
