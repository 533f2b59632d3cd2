"""Bytes of a step through the busiest link of each kind, with the time that they take at its peak."""

import math
from dataclasses import dataclass

from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.known import load_spec
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.memory import checkpoint_bytes
from arpo_megatron.plan.passes import all_reduces, layer_traffic
from arpo_megatron.plan.timing import file_push_traffic, push_is_near, push_traffic, reduction_traffic
from arpo_megatron.plan.workload import trees_of_update, typical


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one kind of communication."""

    name: str
    size: float
    """Bytes per step through one link, or through the filesystem; of a checkpoint per checkpoint."""
    link: str
    floor_s: float
    """Seconds at the peak of the link."""


def step_traffic(config: JobConfig, hardware: Hardware) -> list[Traffic]:
    """Return the traffic of a step, and of a checkpoint, in the order of their use.

    Rollouts are the all-reduces inside an engine, for every token once: repeated prefill is not counted.
    """
    spec, parallel, work = load_spec(config.model), config.parallel, typical(config)
    updates = config.algorithm.minibatches
    own = math.ceil(trees_of_update(config) / parallel.data)
    tokens = updates * own * work.packing(config, spec).computed
    passes = 3 + parallel.recomputed_share(spec.layers)  # old log-probs, then the update
    layers = spec.layers / parallel.pipeline
    found = []
    if config.engine.tensor > 1:
        grown = config.train.tasks_per_step * work.unique / config.engine.replicas
        size = spec.layers * grown * all_reduces(config, spec, config.engine.tensor)
        found.append(_through("rollouts", size, config.engine.tensor <= hardware.gpus, hardware))
    found += [
        _through(f"{name} parallelism", layers * passes * tokens * size, ranks <= hardware.gpus, hardware)
        for name, (size, ranks) in layer_traffic(config, spec).items()
    ]
    size, ranks = reduction_traffic(config, spec)
    found.append(_through("gradients and weights", updates * size, ranks <= hardware.gpus, hardware))
    found.append(_push(config, spec, hardware))
    return [*found, _into_files("checkpoint", checkpoint_bytes(config, spec), hardware)]


def _push(config: JobConfig, spec: ModelSpec, hardware: Hardware) -> Traffic:
    if config.sync.transport == "disk":
        return _into_files("weight push", file_push_traffic(config, spec), hardware)
    return _through("weight push", push_traffic(config, spec), push_is_near(config, hardware), hardware)


def _into_files(name: str, size: float, hardware: Hardware) -> Traffic:
    return Traffic(name, size, "filesystem", size / hardware.filesystem)


def _through(name: str, size: float, near: bool, hardware: Hardware) -> Traffic:
    if near:
        return Traffic(name, size, "GPU to its node", size / hardware.link)
    return Traffic(name, size, "GPU to other nodes", size / hardware.network)
