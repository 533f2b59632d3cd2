"""A process runs on the CPUs of its GPU's NUMA node. This machine has no GPU: a folder stands in for sysfs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from arpo_megatron.hardware.numa import bind_to_gpu, cpus_of, numa_node

GPU = "0000:3B:00.0"


@pytest.fixture
def own_cpus() -> Iterator[list[int]]:
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def system(folder: Path, node: int, cpus: str) -> Path:
    device, place = folder / "bus/pci/devices/0000:3b:00.0", folder / f"devices/system/node/node{node}"
    for each in (device, place):
        each.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (place / "cpulist").write_text(f"{cpus}\n")
    return folder


def test_process_keeps_the_cpus_of_its_gpus_node(tmp_path: Path, own_cpus: list[int]) -> None:
    near = own_cpus[0]
    text = bind_to_gpu(GPU, system(tmp_path, 1, f"{near},9000-9001"))
    assert os.sched_getaffinity(0) == {near}
    assert text == ("" if len(own_cpus) == 1 else f"NUMA node 1, 1 of {len(own_cpus)} CPUs")


def test_unknown_node_and_forbidden_cpus_change_nothing(tmp_path: Path, own_cpus: list[int]) -> None:
    assert bind_to_gpu(GPU, tmp_path) == ""
    assert bind_to_gpu(GPU, system(tmp_path / "far", 0, "9000-9007")) == ""
    assert sorted(os.sched_getaffinity(0)) == own_cpus
    assert numa_node(GPU, system(tmp_path / "none", -1, "0")) is None
    assert cpus_of(0, system(tmp_path / "list", 0, "0-2,8,10-11")) == {0, 1, 2, 8, 10, 11}
