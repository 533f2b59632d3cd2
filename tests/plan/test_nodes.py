"""A recipe on another number of nodes: its own layout for them, or more data-parallel ranks and replicas."""

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.node_layout import lay_out_nodes
from arpo_megatron.plan.nodes import resolve_on_nodes, scale_to_nodes

H100 = GPUS["h100-80"]


@pytest.mark.parametrize(
    ("overrides", "nodes", "placement"),
    [([], 2, "colocated"), (["engine.placement=auto"], 4, "split"), (["engine.placement=auto"], 2, "colocated")],
)
def test_plan_matches_node_layout(overrides: list[str], nodes: int, placement: str) -> None:
    job = resolve.resolve("deepsearch_14b", overrides=overrides)
    found, layout = plan(job, H100, nodes), lay_out_nodes(job, 8, nodes)
    assert found.layout == layout and (found.nodes, found.config.engine.placement) == (nodes, placement)
    assert bool(found.memory.engine) is (placement == "split")
    assert "need 2: use --nodes 2" in (plan(resolve.resolve("deepsearch_14b"), H100, 3).reason or "")


def test_nodes_use_the_recipes_layout_or_scale_data_parallelism() -> None:
    assert resolve_on_nodes("deepsearch_14b", 4, 8) == resolve.resolve("deepsearch_14b+4nodes")
    assert resolve_on_nodes("deepsearch_14b+fp8", 4, 8) == resolve.resolve("deepsearch_14b+fp8+4nodes")
    three = resolve_on_nodes("deepsearch_14b", 3, 8)
    assert (three.parallel.data, three.engine.replicas) == (6, 3)
    with pytest.raises(UserError, match="cannot be divided"):
        scale_to_nodes(resolve.resolve("deepsearch_14b"), 1, 6)
    cold = resolve_on_nodes("sft_7b", 3, 8)
    assert cold.parallel.world_size == 24 and plan(cold, H100, 3).nodes == 3


def test_explicit_layout_keys_are_not_changed() -> None:
    mine = ["parallel.data=2", "engine.replicas=2"]
    assert resolve_on_nodes("deepsearch_14b", 3, 8, overrides=mine) == resolve.resolve("deepsearch_14b", overrides=mine)
    assert resolve_on_nodes("deepsearch_14b", 1, 8, overrides=mine) == resolve.resolve(
        "deepsearch_14b+1node", overrides=mine
    )
    wide = resolve_on_nodes("deepsearch_14b", 4, 8, overrides=["parallel.tensor=8"])
    assert (wide.parallel.tensor, wide.parallel.data, wide.engine.replicas) == (8, 4, 4)
    assert resolve_on_nodes("deepsearch_32b+h200", 2, 8) == resolve.resolve("deepsearch_32b+h200")
    assert (
        resolve_on_nodes("deepsearch_32b+h200", 4, 8).engine.tensor
        == resolve.resolve("deepsearch_32b+h200").engine.tensor
    )
    auto = ["engine.placement=auto"]
    assert resolve_on_nodes("deepsearch_14b", 4, 8, overrides=auto) == resolve.resolve("deepsearch_14b", overrides=auto)


@pytest.mark.parametrize(("nodes", "data", "replicas"), [(2, 2, 1), (3, 2, 2), (4, 4, 2), (6, 6, 3), (16, 16, 8)])
def test_split_job_stays_split_on_any_number_of_nodes(nodes: int, data: int, replicas: int) -> None:
    job = resolve_on_nodes("deepsearch_14b+split", nodes, 8)
    assert (job.engine.placement, job.rollout.max_staleness) == ("split", 1)
    assert (job.parallel.data, job.engine.replicas) == (data, replicas)
    assert lay_out_nodes(job, 8, nodes).nodes == nodes
    word = resolve_on_nodes("deepsearch_14b", nodes, 8, overrides=["engine.placement=split"])
    assert word.engine.placement == "split" and lay_out_nodes(word, 8, nodes).nodes == nodes


@pytest.mark.parametrize(("trainer", "engines"), [(3, 8), (6, 5), (11, 4)])
def test_scaling_keeps_the_ratio_of_whole_nodes(trainer: int, engines: int) -> None:
    overrides = [
        "engine.placement=split",
        "engine.tensor=1",
        f"parallel.data={8 * trainer}",
        f"engine.replicas={8 * engines}",
    ]
    job = scale_to_nodes(resolve.resolve("quickstart", overrides=overrides), 5 * (trainer + engines), 8)
    assert (job.parallel.data, job.engine.replicas) == (40 * trainer, 40 * engines)
