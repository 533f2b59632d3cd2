"""How many GPUs and nodes a job takes."""

from dataclasses import dataclass

from arpo_megatron.config import JobConfig


@dataclass(frozen=True, slots=True)
class Nodes:
    """Of a job on a cluster.

    Attributes:
        trainer: nodes with trainer ranks.
        engine: further nodes with engines alone.
        gpus: that compute, of all nodes.
    """

    trainer: int
    engine: int
    gpus: int

    @property
    def total(self) -> int:
        """Nodes of the allocation."""
        return self.trainer + self.engine


def nodes_of(config: JobConfig, gpus_per_node: int) -> Nodes:
    """Nodes for `parallel.*` trainer ranks and `engine.tensor * engine.replicas` engine GPUs.

    `engine.placement=auto` counts as colocated, which takes fewer. Split engines share a node with the trainer only
    where everything fits into one.
    """
    ranks, engines = config.parallel.world_size, config.engine.tensor * config.engine.replicas
    if config.engine.placement != "split":
        gpus = max(ranks, engines)
        return Nodes(-(-gpus // gpus_per_node), 0, gpus)
    if ranks + engines <= gpus_per_node:
        return Nodes(1, 0, ranks + engines)
    slots = max(1, gpus_per_node // config.engine.tensor)  # an engine does not span nodes
    return Nodes(-(-ranks // gpus_per_node), -(-config.engine.replicas // slots), ranks + engines)
