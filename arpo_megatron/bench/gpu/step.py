"""A whole ARPO training job of a few steps, trainer and engine on one GPU, beside what the planner says of it.

The model has the layout of Qwen3 4B and random weights. Whole tool calls are tokens of its vocabulary
(bench/tool_calling_model.py), as likely as in the planner's typical trajectory, so trees fork and tools are called for
real without any training. Rewards are zero, so gradients are zero, but they are computed. The job is the ordinary one,
stopped after the record of its last step: a checkpoint of 14 bytes a parameter would follow.

Each prediction stands twice: as `arpo plan` gives it before the run, and for the trees that the run has grown, which
tells the planner's idea of the machine from its idea of the work.
"""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from arpo_megatron.bench.gpu.journal import Figures, Part, reset_peak
from arpo_megatron.bench.gpu.random_engines import write_directory
from arpo_megatron.bench.gpu.step_figures import Watched, memory_of, seconds_of, times_of, work_of
from arpo_megatron.bench.gpu.trainer import device_used, in_process, one_gpu
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
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import opened, run_phases, watching
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventReader
from arpo_megatron.monitor.tree_store import read_trees, step_file
from arpo_megatron.plan import memory, plan, timing
from arpo_megatron.plan.workload import TOOL_SHARE, TYPICAL_FILL, grown
from arpo_megatron.utils.processes import ManagedProcesses, ProcessDiedError

ENDLESS = 10**6
LIMIT_S = 400.0
"""A job that has not done all its steps by then is ended with those that it has."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is run.

    Attributes:
        directory: for the model and the run.
        spec: of the model.
        dtype: of its weights.
        steps: of the job, the first of which is not counted: it compiles.
        response: longest response in tokens.
        tasks: of a step.
        samples: trajectories a task.
    """

    directory: Path
    spec: ModelSpec = KNOWN_MODELS["Qwen/Qwen3-4B"]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    steps: int = 3
    response: int = 2048
    tasks: int = 16
    samples: int = 16

    @property
    def calls(self) -> int:
        """Tool calls of a trajectory."""
        return 3

    def config(self) -> JobConfig:
        """Of the job."""
        prompt, running = 64, 256
        return JobConfig(
            name="gpu-step",
            run_dir=self.directory / "run",
            model=ModelConfig(path=self.directory / "model", dtype=self.dtype, max_length=prompt + self.response),
            parallel=ParallelConfig(distributed_optimizer=True, recompute="full"),
            algorithm=AlgorithmConfig(group_size=self.samples, initial_rollouts=self.samples // 2, minibatches=2),
            rollout=RolloutConfig(
                max_tool_calls=self.calls, max_response_tokens=self.response, max_tool_tokens=self.response // 4
            ),
            engine=EngineConfig(max_running_requests=running, memory_fraction=0.3, placement="colocated"),
            sandbox=SandboxConfig(isolation="limits"),  # the programs are this file's own
            train=TrainConfig(
                steps=ENDLESS,
                save_every=ENDLESS,
                tasks_per_step=self.tasks,
                token_budget=max(2048, 8 * self.response),
                logprob_gap_limit=2.0,  # of a random model: a figure here and no reason to stop
            ),
            evaluation=EvalConfig(before=False, after=False),
        )

    def make_model(self, *, weights: bool) -> Path:
        """The model's directory, made where it is missing; without its weights it is never whole."""
        path = self.directory / "model"
        if (path / "config.json").is_file() and (not weights or any(path.glob("*.safetensors"))):
            return path
        shutil.rmtree(path, ignore_errors=True)
        being_made = path.with_name("model.tmp") if weights else path
        shutil.rmtree(being_made, ignore_errors=True)
        being_made.mkdir(parents=True)
        typical_response = TYPICAL_FILL * self.response
        result = TOOL_SHARE * typical_response / self.calls
        segment = (1 - TOOL_SHARE) * typical_response / (self.calls + 1)
        count = round(self.spec.vocabulary / round(segment))
        calls = [f"<python>print(' w{number}' * {round(result)})</python>" for number in range(count)]
        write_directory(being_made, self.spec, self.dtype, calls)
        if weights:
            save_random_weights(being_made, seed=1, device="cuda" if torch.cuda.is_available() else "cpu")
            gc.collect()
            reset_peak()  # gives the memory back
            being_made.rename(path)
        return path


def step_parts(what: Step) -> list[Part]:
    """The job, then its trainer alone, whose memory is told by part."""
    return [Part("job", partial(_prepare_job, what)), Part("trainer by part", partial(_prepare_trainer, what))]


def _prepare_trainer(what: Step) -> Callable[[], Figures]:
    what.make_model(weights=False)
    return partial(in_process, what.config(), what.directory)


def _prepare_job(what: Step) -> Callable[[], Figures]:
    from arpo_megatron.engine.launch import engine_options
    from arpo_megatron.hardware.placement import Placement

    what.make_model(weights=False)
    config, hardware = what.config(), one_gpu()
    ahead = plan(config, hardware)
    engine_options(config.engine, Placement.of(config, 1), config.model.dtype)

    def measure() -> Figures:
        what.make_model(weights=True)
        shutil.rmtree(what.directory / "run", ignore_errors=True)
        watched = _run(config, what.steps)
        rows = watched.rows[1:] or watched.rows
        run = RunDirectory(what.directory / "run")
        trees = [each.tree for row in rows for each in read_trees(step_file(run, int(row["step"])))]
        work = grown(trees)
        needs = memory.of_job(config, what.spec, hardware, work)
        phases = timing.of_step(config, what.spec, hardware, work, needs.kv_tokens)
        return {
            "plan_fits": ahead.fits,
            "startup_s": round(watched.startup_s, 1),
            "steps": len(watched.rows),
            "first_step": seconds_of(watched.rows[0]),
            "phases": times_of(rows, ahead.step_seconds, phases),
            "gib": memory_of(watched, ahead.memory, needs),
            "trees": work_of(rows, config, work.tools_s),
        }

    return measure


class _EnoughError(Exception):
    """The steps that are wanted have been recorded, or the time is up."""


def _run(config: JobConfig, steps: int) -> Watched:
    """Run the job until so many steps are recorded.

    Raises:
        RuntimeError: a role died; with the last line of what it said.
    """
    found, phase, started, own = Watched(), "start", time.monotonic(), device_used()
    with (
        opened(config, resume=False) as run,
        watching(run) as (progress, poll),
        ManagedProcesses(run.logs) as processes,
    ):
        reader = EventReader(run.events)

        def watch() -> None:
            nonlocal phase
            poll()
            for event in reader.new():
                if event["kind"] == "phase":
                    phase = event["name"]
                    if phase == "rollout" and not found.startup_s:
                        found.startup_s = time.monotonic() - started
                elif event["kind"] == "step":
                    found.rows.append(event)
            found.used[phase] = max(found.used[phase], device_used() - own)
            late = time.monotonic() - started > LIMIT_S
            if late and not found.rows:
                raise RuntimeError(f"no step was done within {LIMIT_S:.0f} s: {run.logs}")
            if late or len(found.rows) >= steps:
                raise _EnoughError

        try:
            run_phases(config, run, processes, progress, watch)
        except _EnoughError:
            pass
        except ProcessDiedError as error:
            first, *rest = str(error).strip().splitlines()
            raise RuntimeError(f"{first.partition(';')[0]}: {(rest or [first])[-1].strip(' |')}") from error
    return found
