"""Which role runs on which node and GPU: a pure function of the recipe, the nodes and their GPUs."""

from dataclasses import dataclass, replace
from math import ceil

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import Placement, gpus_for_both, takes_turns


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Nodes are numbered from 0 in the order of the allocation. Tool service, rollout process and router are on node 0.

    Attributes:
        nodes: how many.
        gpus: of a node.
        trainer_nodes: those with trainer ranks: the first so many.
        ranks_per_node: on each of these.
        engines: how many; `place` says where each is. (A list of them would be as long as the cluster is large, and a
            search of layouts makes thousands of plans.)
        engine_gpus: of an engine.
        shared: engines and trainer ranks take turns on the same GPUs.
    """

    nodes: int
    gpus: int
    trainer_nodes: int
    ranks_per_node: int
    engines: int
    engine_gpus: int
    shared: bool

    @property
    def engine_nodes(self) -> int:
        """Those with engines alone."""
        return self.nodes - self.trainer_nodes

    @property
    def gpus_used(self) -> int:
        """That compute, of all nodes; where there are none, ranks and engines."""
        ranks, engines = self.trainer_nodes * self.ranks_per_node, self.engines * self.engine_gpus
        return ranks if self.shared else ranks + engines

    def place(self, engine: int) -> tuple[int, int]:
        """Node and first GPU of an engine."""
        if not self.gpus:  # from the last node backwards
            return self.nodes - 1 - engine % self.nodes, 0
        if self.shared:
            return engine % self.trainer_nodes, engine // self.trainer_nodes * self.engine_gpus
        if not self.engine_nodes:  # behind the ranks of the one node
            return 0, self.ranks_per_node + engine * self.engine_gpus
        slots = self.gpus // self.engine_gpus
        return self.trainer_nodes + engine // slots, engine % slots * self.engine_gpus

    def placement(self, engine: int) -> Placement:
        """Of an engine, on its own node."""
        return Placement(self.gpus, self.place(engine)[1], self.shared)

    def describe(self) -> list[str]:
        """A line for each role."""

        def where(first: int, count: int) -> str:
            return f"node {first}" if count == 1 else f"nodes {first} to {first + count - 1}"

        def gpus(first: int, count: int) -> str:
            if not self.gpus:
                return "CPU"
            return f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"

        services = ["sandbox   node 0, CPU", "rollout   node 0, CPU"] if self.engines else []
        lines = [
            *services,
            f"trainer   {where(0, self.trainer_nodes)}, {self.ranks_per_node} rank(s) each, "
            f"{gpus(0, self.ranks_per_node)}",
        ]
        for index in range(self.engines):
            node, gpu = self.place(index)
            shared = ", shared with the trainer" if self.shared else ""
            lines.append(f"engine-{index}  node {node}, {gpus(gpu, self.engine_gpus)}{shared}")
        return lines


def with_placement(config: JobConfig, layout: NodeLayout) -> JobConfig:
    """With the `engine.placement` that the plan has: `auto` depends on the number of nodes."""
    return replace(config, engine=replace(config.engine, placement="colocated" if layout.shared else "split"))


def lay_out_nodes(config: JobConfig, gpus_per_node: int, nodes: int | None) -> NodeLayout:
    """Lay the roles over nodes; `nodes` None: as few as the config's placement needs. `platform=cpu` uses no GPU.

    Raises:
        UserError: they do not fit, or nodes would have nothing to do.
    """
    ranks, engine = config.parallel.world_size, config.engine
    gpus = 0 if config.platform == "cpu" else gpus_per_node
    if not gpus:
        return _on_cpus(config, nodes or 1)
    if config.sft_only:
        _check_count(nodes, (alone := _trainer_alone(config, gpus)).nodes, "without engines", config, gpus)
        return alone
    if engine.tensor > gpus:
        raise UserError(f"engine.tensor={engine.tensor}: an engine does not span nodes, and a node has {gpus} GPUs")
    alone = _trainer_alone(config, gpus)
    trainer_nodes, per_node = alone.trainer_nodes, alone.ranks_per_node
    slots = gpus // engine.tensor  # engines that a node holds
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
    return NodeLayout(split, gpus, trainer_nodes, per_node, engine.replicas, engine.tensor, shared=False)


def _trainer_alone(config: JobConfig, gpus: int) -> NodeLayout:
    """As without engines."""
    ranks = config.parallel.world_size
    per_node, nodes = min(ranks, gpus), ceil(ranks / gpus)
    if ranks % per_node:
        raise UserError(f"{ranks} trainer ranks cannot be divided among nodes of {gpus} GPUs: change parallel.*")
    return NodeLayout(nodes, gpus, nodes, per_node, 0, config.engine.tensor, shared=True)


def _on_cpus(config: JobConfig, nodes: int) -> NodeLayout:
    """Ranks divided evenly among the first nodes."""
    ranks, engine = config.parallel.world_size, config.engine
    if engine.tensor > 1:
        raise UserError(f"engine.tensor={engine.tensor}: an engine on a CPU has one rank")
    if nodes > max(ranks, engine.replicas + 1):
        raise UserError(f"{nodes} nodes, but only {ranks} trainer rank(s) and {engine.replicas} engine(s)")
    trainer_nodes = min(nodes, ranks)
    if ranks % trainer_nodes:
        raise UserError(f"{ranks} trainer ranks cannot be divided evenly among {trainer_nodes} nodes")
    replicas = 0 if config.sft_only else engine.replicas
    turns = takes_turns(config, enough=True)
    return NodeLayout(nodes, 0, trainer_nodes, ranks // trainer_nodes, replicas, engine.tensor, turns)


def _check_count(given: int | None, needed: int, placement: str, config: JobConfig, gpus: int) -> None:
    if given is None or given == needed:
        return
    engines = f"{config.engine.replicas} engine(s) of {config.engine.tensor} GPU(s)"
    raise UserError(
        f"{given} nodes of {gpus} GPUs, but {config.parallel.world_size} trainer ranks and {engines}, {placement}, "
        f"take {needed}: give --nodes {needed}, or change parallel.*, engine.replicas or engine.placement"
    )
