"""The largest model that trains on this machine's one GPU with FP8 and the optimizer's state in host memory.

The planner says how large a share of the state has to go to the host. Where the host has no room for it, the model's
gradients alone are computed: what the GPU holds in an update is then measured all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arpo_megatron.bench.gpu.journal import Figures, Part
from arpo_megatron.bench.gpu.trainer import in_process, one_gpu
from arpo_megatron.config import (
    Fp8Recipe,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
)
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.plan import Hardware, Plan, plan

SIZES = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the optimizer's state in host memory."""
HOST_SHARE = 0.6
"""Of the host's memory that this may take by the plan: torch rounds pinned memory up to powers of two."""
LENGTH = 8192
"""Tokens of the sequence that is trained."""
GOAL = "Qwen/Qwen3-14B"


@dataclass(frozen=True, slots=True)
class Largest:
    """What is tried.

    Attributes:
        directory: for configs.
        sizes: Hugging Face ids of known shapes, the smallest first.
        recipe: of the products.
        made: in the place of those sizes, the model that a config makes.
        hardware: that the plan is for; None: this machine's.
    """

    directory: Path
    sizes: tuple[str, ...] = SIZES
    recipe: Fp8Recipe = "blockwise"
    made: ModelConfig | None = None
    hardware: Hardware | None = None

    def config(self, size: str, share: float) -> JobConfig:
        """Supervised training, a sequence an update, without engines; no file of it is read."""
        model = self.made or ModelConfig(hub_id=size, fp8=self.recipe, max_length=LENGTH)
        optimizer = OptimizerConfig(offload=True, offload_fraction=share)
        layout = ParallelConfig(distributed_optimizer=True, recompute="full")
        budget = TrainConfig(token_budget=model.max_length)
        if self.made is not None:  # a job of tasks
            return JobConfig(name="gpu-largest", model=model, parallel=layout, optimizer=optimizer, train=budget)
        alone = SftConfig(steps=1, batch=1, data=self.directory / "none.jsonl", optimizer=optimizer)
        return JobConfig(name="gpu-largest", model=model, parallel=layout, sft=alone, train=budget)


def largest_parts(what: Largest) -> list[Part]:
    """One size after the other."""
    return [Part(size.rpartition("/")[2], partial(_prepare, what, size)) for size in what.sizes]


def _prepare(what: Largest, size: str) -> Callable[[], Figures]:
    hardware = what.hardware or one_gpu()
    planned, trains = chosen_plan(what, size, hardware)
    claim = _claim(planned, hardware)

    def measure() -> Figures:
        folder = what.directory / size.rpartition("/")[2]
        found = in_process(planned.config, folder, gradients=not trains)
        return {"trains": trains, "goal": f"{GOAL} trains", **claim, **found}

    return measure


def chosen_plan(what: Largest, size: str, hardware: Hardware) -> tuple[Plan, bool]:
    """With as much of the state in host memory as there is room for, and whether there is for any share of it."""
    planned = [plan(what.config(size, share), hardware) for share in SHARES]
    found = next((each for each in planned if _has_room(each, hardware)), None)
    return found or planned[0], found is not None


def _has_room(found: Plan, hardware: Hardware) -> bool:
    training = sum(found.memory.training.values())
    return training <= hardware.memory and found.memory.host["optimizer"] <= HOST_SHARE * hardware.host_memory


def _claim(found: Plan, hardware: Hardware) -> Figures:
    training = sum(found.memory.training.values())
    optimizer = found.config.sft.optimizer if found.config.sft_only else found.config.optimizer
    return {
        "parameters": found.parameters,
        "share_in_host_memory": optimizer.offload_fraction,
        "plan": {
            "gpu_gib": round(training / GIB, 1),
            "of_gpu_gib": round(hardware.memory / GIB, 1),
            "gpu_has_room": training <= hardware.memory,
            "host_gib": round(found.memory.host["optimizer"] / GIB, 1),
            "of_host_gib": round(hardware.host_memory / GIB, 1),
        },
    }
