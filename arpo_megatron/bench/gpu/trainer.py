"""Memory and seconds of the trainer alone, by part, beside what the planner says, in a process of its own.

An update of the largest tree that the job allows, with random weights. As a program:
`python -m arpo_megatron.bench.gpu.trainer CONFIG update|gradients BYTES`, the last of them used by others on the GPU.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.optimizer_state import inner_optimizers
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench import memory as resident
from arpo_megatron.bench.gpu.journal import Figures, reset_peak, timed
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.hardware.environment import trainer_environment
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import load_spec
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan import GPUS, Hardware, memory, timing
from arpo_megatron.plan.workload import grown, largest
from arpo_megatron.utils.processes import how_it_ended

MEMORY_GOAL, TIME_GOAL = 0.1, 0.25
"""How far a measurement may be from its plan."""
PASSES = ("fp8_copies", "activations", "working", "logits")
"""Parts of the planner that are there in a pass over packs alone, and that no tensor of the trainer's tells apart."""
REPEATS = 2
TIMEOUT_S = 240.0


def one_gpu(name: str = "h200") -> Hardware:
    """A node like this machine: one GPU, and the host memory that is here."""
    return replace(GPUS[name], gpus=1, host_memory=float(host_bytes()))


def host_bytes() -> int:
    """Of this machine, or what its control group allows."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(file).read_text().strip() if Path(file).is_file() else "max"
        found += [int(text)] if text.isdigit() else []
    return min(found)


def beside(planned: float, measured: float, goal: float) -> Figures:
    """A planned and a measured figure, how many times the plan the measurement is, and how near it should be."""
    ratio = round(measured / planned, 3) if planned else None
    planned, measured = (float(f"{value:.4g}") for value in (planned, measured))
    return {"planned": planned, "measured": measured, "ratio": ratio, "goal_within": goal}


def gib(planned: float, measured: float) -> Figures:
    """The same for bytes, in GiB."""
    return beside(planned / GIB, measured / GIB, MEMORY_GOAL)


def in_process(config: JobConfig, folder: Path, *, gradients: bool = False) -> Figures:
    """`measure` in a process of its own.

    Raises:
        RuntimeError: it failed; with the last line that it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    save_config(config, file)
    what = "gradients" if gradients else "update"
    others = device_used() if torch.cuda.is_initialized() else 0  # this process's context, most likely
    command = [sys.executable, "-m", "arpo_megatron.bench.gpu.trainer", str(file), what, str(others)]
    environment = {**os.environ, **trainer_environment(config.platform)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("[rank0]: ")
        raise RuntimeError(f"the trainer {how_it_ended(done.returncode)}: {last}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(config: JobConfig, *, gradients: bool, others: int) -> Figures:
    """Updates of the first tree of the planner's `largest`; the first one is not timed.

    Args:
        config: of a job of one rank.
        gradients: no optimizer is made, and no update: for state that this machine has no room for.
        others: bytes of the device that other processes use.
    """
    parallel.initialize(config.parallel, config.seed)
    spec, hardware = load_spec(config.model), one_gpu()
    trees = largest(config).trees[:1]
    work = grown(trees)
    packs = pack_trees(trees, supervised_credit(trees), token_budget=config.train.token_budget)
    planned = memory.of_job(config, spec, hardware, work)
    reset_peak()
    free = _available()
    optimizer = config.sft.optimizer if config.sft_only else config.optimizer
    actor = Actor(config, spec, None, optimizer=None if gradients else optimizer, total_updates=100)
    held = held_bytes(actor)
    built = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    reset_peak()
    update = partial(actor.accumulate if gradients else actor.update, packs, None, "nll")
    seconds = [timed(update) for _ in range(1 + REPEATS)]
    parts = dict(planned.training)
    if gradients:
        parts["optimizer"] = 0.0
    rows = {name: gib(parts[name], held[name]) for name in held}
    figures: dict[str, Any] = {"tokens": sum(len(pack) for pack in packs), "packs": len(packs), "gib": rows}
    if torch.cuda.is_available():
        passes = {name: parts[name] for name in PASSES if name in parts}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        rows["passes"] = gib(sum(passes.values()), peak - sum(held.values())) | {
            "of": {name: round(size / GIB, 2) for name, size in passes.items()}
        }
        rows["allocated"] = gib(sum(parts[name] for name in held) + sum(passes.values()), peak)
        rows["context"] = gib(parts["cuda_context"], device_used() - others - torch.cuda.memory_reserved())
        rows["unfilled"] = gib(parts["reserve"], reserved - peak)
        figures["gib_while_built"] = round(built / GIB, 2)
    if "optimizer" in planned.host:
        rows["host"] = gib(planned.host["optimizer"], free - _available())
    figures["gib_resident"] = round(resident.highest() / GIB, 2)
    phases = timing.of_step(config, spec, hardware, work, planned.kv_tokens)
    # Of a step's trees this is one.
    trees_a_step = config.sft.batch if config.sft_only else config.train.tasks_per_step
    updates = 1 if config.sft_only else config.algorithm.minibatches
    expected = phases["forward_backward"] / trees_a_step + (0 if gradients else phases["optimizer"] / updates)
    return figures | {"step_s": beside(expected, median(seconds[1:]), TIME_GOAL), "first_s": round(seconds[0], 2)}


def held_bytes(actor: Actor) -> dict[str, int]:
    """Bytes on the device of what an actor keeps between updates."""
    weights = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    buffers = [buffer for wrapped in actor._wrapped for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]
    found = {"weights": sum(weight.nbytes for weight in weights), "optimizer": 0}
    found["gradients"] = sum(buffer.grad_data.nbytes for buffer in buffers)
    for inner in inner_optimizers(actor.optimizer) if actor.optimizer is not None else ():
        of_groups = [p for group in inner.param_groups for p in group["params"] if p.dtype != weights[0].dtype]
        states = [value for state in inner.state.values() for name, value in state.items() if name != "master_param"]
        tensors = [value for value in (*of_groups, *states) if isinstance(value, torch.Tensor) and value.dim()]
        found["optimizer"] += sum(value.nbytes for value in tensors if value.device.type == weights[0].device.type)
    return found


def device_used() -> int:
    """Bytes of the GPU that all processes use; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _available() -> int:
    """Bytes of host memory that nobody has: pinned memory is not in a process's resident pages."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    found = measure(resolve.load(Path(sys.argv[1])), gradients=sys.argv[2] == "gradients", others=int(sys.argv[3]))
    print(json.dumps(found), flush=True)
