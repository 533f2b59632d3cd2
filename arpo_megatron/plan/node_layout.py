"""Node layout: which process runs on which node and GPU, a pure function of the config, the nodes and their GPUs."""

from dataclasses import dataclass, replace
from math import ceil

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import Placement, gpus_for_both, takes_turns


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Trainer ranks and engines on nodes, which are numbered from 0 in the order of the allocation.

    Rollout process and router are on node 0, tool services on one node after the other. Engines are not a list but
    computed by `place`, because a layout search makes thousands of layouts.
    """

    nodes: int
    gpus: int
    """GPUs per node; 0 for a job on CPUs."""
    trainer_nodes: int
    """Number of nodes with trainer ranks; they come first."""
    ranks_per_node: int
    """Trainer ranks on each of these nodes."""
    engines: int
    engine_gpus: int
    colocated: bool
    """Whether engines and trainer ranks take turns on the same GPUs."""
    tool_services: int = 1

    @property
    def engine_nodes(self) -> int:
        """Number of nodes that have only engines."""
        return self.nodes - self.trainer_nodes

    @property
    def gpus_used(self) -> int:
        """GPUs in use on all nodes; for a job on CPUs, the number of ranks and engines."""
        ranks, engines = self.trainer_nodes * self.ranks_per_node, self.engines * self.engine_gpus
        return ranks if self.colocated else ranks + engines

    def place(self, engine: int) -> tuple[int, int]:
        """Return node and first GPU of an engine."""
        if not self.gpus:  # from the last node backwards
            return self.nodes - 1 - engine % self.nodes, 0
        if self.colocated:
            return engine % self.trainer_nodes, engine // self.trainer_nodes * self.engine_gpus
        if not self.engine_nodes:  # after the ranks of the only node
            return 0, self.ranks_per_node + engine * self.engine_gpus
        slots = self.gpus // self.engine_gpus
        return self.trainer_nodes + engine // slots, engine % slots * self.engine_gpus

    def placement(self, engine: int) -> Placement:
        """Return the placement of an engine on its node."""
        return Placement(self.gpus, self.place(engine)[1], self.colocated)

    def describe(self) -> list[str]:
        """Return one line per process, with its nodes and GPUs."""

        def where(first: int, count: int) -> str:
            return f"node {first}" if count == 1 else f"nodes {first} to {first + count - 1}"

        def gpus(first: int, count: int) -> str:
            if not self.gpus:
                return "CPU"
            return f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"

        last = min(self.tool_services, self.nodes)
        services = ["rollout   node 0, CPU"] if self.engines else []
        if services and last:
            services.insert(0, f"sandbox   {where(0, last)}, CPU")
        lines = [
            *services,
            f"trainer   {where(0, self.trainer_nodes)}, {self.ranks_per_node} rank(s) each, "
            f"{gpus(0, self.ranks_per_node)}",
        ]
        for index in range(self.engines):
            node, gpu = self.place(index)
            colocated = ", colocated with the trainer" if self.colocated else ""
            lines.append(f"engine-{index}  node {node}, {gpus(gpu, self.engine_gpus)}{colocated}")
        return lines


def with_placement(config: JobConfig, layout: NodeLayout) -> JobConfig:
    """Return the config with the layout's `engine.placement`, which for `auto` depends on the number of nodes."""
    return replace(config, engine=replace(config.engine, placement="colocated" if layout.colocated else "split"))


def lay_out_nodes(config: JobConfig, gpus_per_node: int, nodes: int | None) -> NodeLayout:
    """Lay out a job on nodes; None takes as few as its placement needs. `platform=cpu` uses no GPU.

    Raises:
        UserError: the job does not fit, or nodes would have nothing to do.
    """
    services = 0 if config.sandbox.urls else config.sandbox.replicas
    return replace(_lay_out(config, gpus_per_node, nodes), tool_services=services)


def _lay_out(config: JobConfig, gpus_per_node: int, nodes: int | None) -> NodeLayout:
    ranks, engine = config.parallel.world_size, config.engine
    gpus = 0 if config.platform == "cpu" else gpus_per_node
    if not gpus:
        return _on_cpus(config, nodes or 1)
    if config.sft_only:
        _check_count(nodes, (alone := _trainer_alone(config, gpus)).nodes, "without engines", config, gpus)
        return alone
    if engine.tensor > gpus:
        raise UserError(f"engine.tensor={engine.tensor}: an engine cannot span nodes, and a node has {gpus} GPUs")
    alone = _trainer_alone(config, gpus)
    trainer_nodes, per_node = alone.trainer_nodes, alone.ranks_per_node
    slots = gpus // engine.tensor  # engines per node
    together = gpus_for_both(config) <= gpus
    split = 1 if together else trainer_nodes + ceil(engine.replicas / slots)
    if takes_turns(config, nodes is None or nodes >= split):
        _check_count(nodes, trainer_nodes, "colocated", config, gpus)
        slots = per_node // engine.tensor
        if engine.replicas > slots * trainer_nodes:
            raise UserError(
                f"{engine.replicas} engines of {engine.tensor} GPUs do not fit on the trainer's {ranks} GPUs: lower "
                "engine.replicas"
            )
        return replace(alone, engines=engine.replicas)
    _check_count(nodes, split, "split", config, gpus)
    return NodeLayout(split, gpus, trainer_nodes, per_node, engine.replicas, engine.tensor, colocated=False)


def _trainer_alone(config: JobConfig, gpus: int) -> NodeLayout:
    """Return the layout of the trainer ranks without engines. Raises UserError if they do not divide evenly."""
    ranks = config.parallel.world_size
    per_node, nodes = min(ranks, gpus), ceil(ranks / gpus)
    if ranks % per_node:
        raise UserError(f"{ranks} trainer ranks cannot be divided among nodes of {gpus} GPUs: change parallel.*")
    return NodeLayout(nodes, gpus, nodes, per_node, 0, config.engine.tensor, colocated=True)


def _on_cpus(config: JobConfig, nodes: int) -> NodeLayout:
    """Return a layout with the ranks divided evenly among the first nodes."""
    ranks, engine = config.parallel.world_size, config.engine
    if nodes > (most := max(ranks, engine.replicas + 1)):
        raise UserError(
            f"{nodes} nodes are too many for {ranks} trainer rank(s) and {engine.replicas} engine(s): "
            f"use --nodes {most} or fewer"
        )
    trainer_nodes = min(nodes, ranks)
    if ranks % trainer_nodes:
        possible = max(size for size in range(1, trainer_nodes) if ranks % size == 0)
        raise UserError(
            f"{ranks} trainer ranks cannot be divided evenly among {trainer_nodes} nodes: use --nodes {possible}"
        )
    replicas = 0 if config.sft_only else engine.replicas
    turns = takes_turns(config, enough=True)
    return NodeLayout(nodes, 0, trainer_nodes, ranks // trainer_nodes, replicas, engine.tensor, turns)


def _check_count(given: int | None, needed: int, placement: str, config: JobConfig, gpus: int) -> None:
    if given is None or given == needed:
        return
    engines = f"{config.engine.replicas} engine(s) of {config.engine.tensor} GPU(s)"
    raise UserError(
        f"{given} nodes of {gpus} GPUs, but {config.parallel.world_size} trainer ranks and {engines}, {placement}, "
        f"need {needed}: use --nodes {needed}, or change parallel.*, engine.replicas or engine.placement"
    )
