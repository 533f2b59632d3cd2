"""Speeds that the preflight measures, and faults of GPUs: which node is named."""

from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from arpo_megatron.launch.preflight.allreduce import all_reduce
from arpo_megatron.launch.preflight.bandwidth import (
    NetworkSpeeds,
    judge_network,
    measure_network,
    pair_nodes,
    write_speed,
)
from arpo_megatron.launch.preflight.gpu_health import judge_gpus
from arpo_megatron.utils.ports import free_ports


@pytest.mark.parametrize("nodes", range(2, 12))
def test_nodes_meet_both_neighbours_in_rounds_of_disjoint_pairs(nodes: int) -> None:
    rounds = pair_nodes(nodes)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    edges = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert edges == sorted({tuple(sorted((node, (node + 1) % nodes))) for node in range(nodes)})
    assert pair_nodes(1) == []


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_slow_node_alone_is_named(nodes: int) -> None:
    """An exchange is as slow as its slower side."""
    link = dict.fromkeys(range(nodes), 350.0) | {1: 40.0}
    rounds = [dict(pairs) | {b: a for a, b in pairs} for pairs in pair_nodes(nodes)]
    speeds = tuple(
        max(min(link[node], link[partners[node]]) for partners in rounds if node in partners) for node in range(nodes)
    )
    names = [f"n{node}" for node in range(nodes)]
    found = judge_network(names, NetworkSpeeds(40.0, speeds), 280.0)
    assert [name for name, item in found if item.level == "failure"] == ["n1"]
    assert "exclude: n1" in found[-1][1].fix
    assert all(item.level == "ok" for _, item in judge_network(names, NetworkSpeeds(40.0, speeds), None))


def test_tcp_instead_of_the_fast_network_is_a_failure() -> None:
    """Eight GPUs with 50 GB/s each are expected to send 280 GB/s; NCCL over TCP sends a few."""
    ((name, item),) = judge_network(["a", "b"], NetworkSpeeds(1.0, (12.0, 12.0)), 280.0)
    assert name == "all nodes" and item.level == "failure" and "NCCL uses TCP" in item.text
    ((_, item),) = judge_network(["a", "b"], NetworkSpeeds(40.0, (250.0, 251.0)), 280.0)
    assert item.level == "ok"


def _rank(rank: int, port: int, results: "Queue[NetworkSpeeds | str]") -> None:
    def measure() -> None:
        results.put(measure_network(3, 2, "cpu"))

    found = all_reduce(rank, 6, "127.0.0.1", port, "cpu", set(), measure=measure)
    if found.level != "ok":
        results.put(found.text)


def test_ranks_of_three_nodes_measure_the_same(tmp_path: Path) -> None:
    context = get_context("forkserver")  # it has imported torch if other tests of this process use it
    results: Queue[NetworkSpeeds | str] = context.Queue()
    (port,) = free_ports(1)
    ranks = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(6)]
    for each in ranks:
        each.start()
    found = [results.get(timeout=120) for _ in ranks]
    for each in ranks:
        each.join(30)
    assert all(each == found[0] for each in found)
    first = found[0]
    assert isinstance(first, NetworkSpeeds)
    assert first.all_reduce_gb_s > 0 and len(first.node_gb_s) == 3 and min(first.node_gb_s) > 0
    assert write_speed(tmp_path, 2**20) > 0 and not list(tmp_path.iterdir())


def test_gpu_faults_are_named() -> None:
    healthy = ["0, 0, No, No", "1, [N/A], [N/A], [N/A]"]
    assert judge_gpus(healthy, []).level == "ok"
    assert "not readable" in judge_gpus(healthy, None).text
    suspect = judge_gpus(
        ["0, 2, No, No", "1, 0, Yes, No"],
        ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "NVRM: Xid (PCI:0000:3c:00): 31, pid=1"],
    )
    assert suspect.level == "warning"
    text = "GPU 0: 2 uncorrectable ECC errors; GPU 1: a row remap is pending; GPU 0000:3b:00: Xid 79 (fell off the bus)"
    assert suspect.text == text
    broken = judge_gpus(["0, 0, No, Yes"], [])
    assert broken.level == "failure" and "GPU 0: a row remap failed" in broken.text
