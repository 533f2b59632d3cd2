"""A whole training job of a few steps, trainer and engine on one GPU: seconds by phase and device memory.

The model has the sizes of Qwen3 4B and random weights. Its vocabulary contains whole tool calls
(bench/tool_calling_model.py), so trees fork and tools run without any training. Rewards and gradients are zero, but
they are computed. The job ends after the record of its last step, before a checkpoint of 14 bytes per parameter.
"""

import gc
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from arpo_megatron.bench.gpu.measure import Figures, reset_peak, used_bytes
from arpo_megatron.bench.gpu.random_engines import write_directory
from arpo_megatron.config import (
    AlgorithmConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    SandboxConfig,
    TrainConfig,
)
from arpo_megatron.launch.job import open_job, run_job_phases
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventReader
from arpo_megatron.utils.processes import ProcessDiedError

ENDLESS = 10**6
LIMIT_S = 400.0
"""The job is stopped after this time with the steps that it has recorded."""
CALLS = 3
"""Tool calls of a trajectory at most."""
SEGMENT_SHARE, RESULT_SHARE = 1 / 13, 1 / 15
"""Mean length of a sampled segment and length of a tool result, as shares of the longest response."""
_METRICS = ("tokens_sampled", "unique_tokens", "forks", "prefill_over_unique", "tokens_per_s", "trainer/tokens_per_s")


@dataclass(frozen=True, slots=True)
class StepBench:
    """A short training job on synthetic tasks that measures whole steps; its sizes are the fields."""

    directory: Path
    """Directory of the model and the run."""
    spec: ModelSpec = KNOWN_MODELS["Qwen/Qwen3-4B"]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    steps: int = 3
    """Steps of the job; the first one compiles and is not in the medians."""
    response: int = 2048
    """Longest response in tokens."""
    tasks: int = 16
    """Tasks per step."""
    group_size: int = 16
    """Trajectories per task."""

    def config(self) -> JobConfig:
        """Return the config of the job."""
        prompt = 64
        return JobConfig(
            name="gpu-step",
            run_dir=self.directory / "run",
            model=ModelConfig(path=self.directory / "model", dtype=self.dtype, max_length=prompt + self.response),
            parallel=ParallelConfig(distributed_optimizer=True, recompute="full"),
            algorithm=AlgorithmConfig(group_size=self.group_size, initial_rollouts=self.group_size // 2, minibatches=2),
            rollout=RolloutConfig(
                max_tool_calls=CALLS, max_response_tokens=self.response, max_tool_tokens=self.response // 4
            ),
            engine=EngineConfig(max_running_requests=256, memory_fraction=0.3, placement="colocated"),
            sandbox=SandboxConfig(isolation="limits"),  # the only programs are those of `make_model`
            train=TrainConfig(
                steps=ENDLESS,
                save_every=ENDLESS,
                tasks_per_step=self.tasks,
                token_budget=max(2048, 8 * self.response),
                logprob_gap_limit=2.0,  # a random model's gap is a figure, not a reason to stop
            ),
            evaluation=EvalConfig(before=False, after=False),
        )

    def make_model(self) -> None:
        """Write the random model unless it exists."""
        path = self.directory / "model"
        if path.exists():
            return
        partial_path = path.with_name("model.tmp")
        shutil.rmtree(partial_path, ignore_errors=True)
        partial_path.mkdir(parents=True)
        count = round(self.spec.vocabulary / round(SEGMENT_SHARE * self.response))
        result = round(RESULT_SHARE * self.response)
        calls = [f"<python>print(' w{number}' * {result})</python>" for number in range(count)]
        write_directory(partial_path, self.spec, self.dtype, calls)
        save_random_weights(partial_path, seed=1, device="cuda" if torch.cuda.is_available() else "cpu")
        gc.collect()
        reset_peak()  # the job needs the memory
        partial_path.rename(path)

    def measure(self) -> Figures:
        """Run the job and return medians over its steps, without the first."""
        self.make_model()
        shutil.rmtree(self.directory / "run", ignore_errors=True)
        found = self._run()
        rows = found.steps[1:] or found.steps
        phases = [key for key in rows[0] if key.startswith("seconds/")]
        seconds = {key.removeprefix("seconds/"): round(median(row.get(key, 0.0) for row in rows), 3) for key in phases}
        return {
            "startup_s": round(found.startup_s, 1),
            "steps": len(found.steps),
            "step_s": round(median(sum(row.get(key, 0.0) for key in phases) for row in rows), 3),
            "seconds_by_phase": seconds,
            "trainer_peak_gib": round(max(float(row["memory_peak_gb"]) for row in found.steps) * 1e9 / 2**30, 2),
            "device_gib_by_phase": {phase: round(used / 2**30, 2) for phase, used in found.used.items()},
            **{key: median(float(row[key]) for row in rows) for key in _METRICS},
        }

    def _run(self) -> "_Observed":
        """Run the job until its steps are recorded.

        Raises:
            RuntimeError: a process died, or no step finished in `LIMIT_S`.
        """
        found, phase = _Observed(), "start"
        started, own = time.monotonic(), used_bytes()
        with open_job(self.config(), resume=False) as job:
            reader = EventReader(job.run.events)

            def watch() -> None:
                nonlocal phase
                for event in reader.new():
                    if event["kind"] == "phase":
                        phase = event["name"]
                        if phase == "rollout" and not found.startup_s:
                            found.startup_s = time.monotonic() - started
                    elif event["kind"] == "step":
                        found.steps.append(event)
                found.used[phase] = max(found.used[phase], used_bytes() - own)
                late = time.monotonic() - started > LIMIT_S
                if late and not found.steps:
                    raise RuntimeError(f"no step finished within {LIMIT_S:.0f} s; logs: {job.run.logs}")
                if late or len(found.steps) >= self.steps:
                    raise _EnoughError

            job.supervisor.checks.append(watch)
            try:
                run_job_phases(job)
            except _EnoughError:
                pass
            except ProcessDiedError as error:
                raise RuntimeError(str(error).strip().splitlines()[-1].strip(" |")) from error
        return found


class _EnoughError(Exception):
    """All steps are recorded, or the time is up."""


@dataclass(slots=True)
class _Observed:
    """Metrics, memory and start-up time, collected while the job runs."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    used: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Most device bytes in use by all processes of the job, by phase."""
    startup_s: float = 0.0
    """Seconds until the first trees started."""
