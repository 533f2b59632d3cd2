"""Processes are laid out on nodes and GPUs, or the reason is a one-line error."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import Placement
from arpo_megatron.jobs import resolve
from arpo_megatron.plan.node_layout import NodeLayout, lay_out_nodes


def job(**engine: object) -> JobConfig:
    overrides = [f"engine.{name}={value}" for name, value in engine.items()]
    return resolve.resolve("quickstart", overrides=["parallel.tensor=2", "parallel.data=4", *overrides])


def places(plan: NodeLayout) -> list[tuple[int, int]]:
    """Return node and first GPU of each engine."""
    return [plan.place(index) for index in range(plan.engines)]


def used(plan: NodeLayout, ranks: bool = True) -> list[tuple[int, int]]:
    """Return (node, GPU) of every engine rank and every trainer rank."""
    engines = [(node, first + gpu) for node, first in places(plan) for gpu in range(plan.engine_gpus)]
    trainer = [(node, gpu) for node in range(plan.trainer_nodes) for gpu in range(plan.ranks_per_node)]
    return engines + trainer if ranks else engines


@given(
    data=st.integers(1, 2),
    replicas=st.integers(1, 8),
    tensor=st.sampled_from([1, 2]),
    placement=st.sampled_from(["auto", "split", "colocated"]),
    gpus=st.sampled_from([0, 1, 4, 8]),
)
def test_layout_of_one_node_matches_placement(data: int, replicas: int, tensor: int, placement: str, gpus: int) -> None:
    config = job(replicas=replicas, tensor=tensor, placement=placement)
    config = replace(config, parallel=replace(config.parallel, data=data))
    try:
        plan = lay_out_nodes(config, gpus, 1)
    except UserError:
        return
    here = Placement.of(config, gpus)
    for index in range(replicas):
        assert plan.placement(index) == here.of_engine(index, config.engine)


def test_layouts_of_split_and_colocated_placement() -> None:
    split = lay_out_nodes(job(replicas=4, tensor=2, placement="split"), 8, None)
    assert (split.nodes, split.trainer_nodes, split.ranks_per_node, split.colocated) == (2, 1, 8, False)
    assert places(split) == [(1, 0), (1, 2), (1, 4), (1, 6)]
    together = lay_out_nodes(job(replicas=4, tensor=2, placement="colocated"), 8, None)
    assert (together.nodes, together.colocated, places(together)) == (1, True, [(0, 0), (0, 2), (0, 4), (0, 6)])
    assert lay_out_nodes(job(replicas=4, tensor=2), 8, 2) == split
    assert lay_out_nodes(job(replicas=4, tensor=2), 8, 1) == together


@given(
    data=st.integers(1, 6),
    replicas=st.integers(1, 9),
    tensor=st.sampled_from([1, 2, 4]),
    placement=st.sampled_from(["split", "colocated"]),
    gpus=st.sampled_from([0, 4, 8]),
)
def test_layout_uses_no_gpu_twice_unless_shared(
    data: int, replicas: int, tensor: int, placement: str, gpus: int
) -> None:
    config = job(replicas=replicas, tensor=tensor, placement=placement)
    config = replace(config, parallel=replace(config.parallel, data=data))
    try:
        plan = lay_out_nodes(config, gpus, None)
    except UserError:
        return
    assert plan.trainer_nodes * plan.ranks_per_node == config.parallel.world_size
    assert plan.engines == replicas
    if not gpus:
        return
    assert all(node < plan.nodes and gpu < gpus for node, gpu in used(plan))
    taken = used(plan, ranks=not plan.colocated)
    assert len(taken) == len(set(taken))
    assert {node for node, _ in used(plan)} == set(range(plan.nodes)), "a node has nothing to do"


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_layout_does_not_depend_on_the_size_of_the_cluster(placement: str) -> None:
    """A search makes thousands of layouts; with a list of engines in each, 100000 nodes took forever."""
    sizes = []
    for nodes in (2, 200_000):
        config = job(replicas=4 * nodes, placement=placement)
        config = replace(config, parallel=replace(config.parallel, data=2 * nodes))
        plan = lay_out_nodes(config, 8, None)
        assert plan.engines == 4 * nodes
        sizes.append(len(repr(plan)))
    assert sizes[1] < sizes[0] + 50


def test_cpu_ranks_are_divided_among_nodes() -> None:
    plan = lay_out_nodes(resolve.resolve("quickstart", overrides=["parallel.data=2", "platform=cpu"]), 8, 2)
    assert (plan.gpus, plan.trainer_nodes, plan.ranks_per_node, places(plan)) == (0, 2, 1, [(1, 0)])


def test_job_with_tool_services_elsewhere_starts_none() -> None:
    job = resolve.resolve("quickstart", overrides=["platform=cpu", "sandbox.urls=[http://n9:8710]"])
    layout = lay_out_nodes(job, 0, 2)
    assert layout.tool_services == 0 and not any("sandbox" in line for line in layout.describe())


@pytest.mark.parametrize(
    ("engine", "gpus", "nodes", "message"),
    [
        ({"tensor": 16}, 8, None, "an engine cannot span nodes"),
        ({"placement": "split", "replicas": 8}, 8, 3, "use --nodes 2"),
        ({"placement": "colocated", "replicas": 9}, 8, None, "lower engine.replicas"),
        ({}, 3, None, "cannot be divided among nodes of 3 GPUs"),
        ({}, 0, 16, "16 nodes are too many for 8 trainer"),
        ({}, 0, 3, "cannot be divided evenly among 3 nodes: use --nodes 2$"),
    ],
)
def test_layout_error_is_one_line(engine: dict[str, object], gpus: int, nodes: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lay_out_nodes(job(**engine), gpus, nodes)
