"""Ranges of flattened weights as boxes, and a full disk during a real optimizer's save."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.actor import optimizer_state
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore, newest_intact
from arpo_megatron.actor.optimizer import optimizer_name
from arpo_megatron.config import OptimizerConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases
from tests.faults import FULL, small_disk


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_tile_a_range_in_order_and_are_few(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    places = np.arange(size).reshape(shape)
    found = list(optimizer_state.split_into_boxes(shape, start, end))
    cuts = [places[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert [int(i) for cut in cuts for i in cut] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def new_actor(dtype: str = "float32", **optimizer) -> Actor:
    torch.manual_seed(1)
    job = cases.job(ParallelConfig(distributed_optimizer=dtype == "bfloat16"), dtype)
    return Actor(job, cases.QWEN3, None, optimizer=OptimizerConfig(lr=1e-2, **optimizer), total_updates=10)


def update(actor: Actor, seed: int) -> object:
    return actor.update(pack_trees(*cases.batch(seed), token_budget=120), None)


@pytest.mark.usefixtures("one_rank")
def test_parameters_have_separate_step_tensors_after_a_load(tmp_path):
    actor = new_actor("bfloat16")
    update(actor, 0)
    cases.save(actor, tmp_path)
    actor.load(tmp_path)
    (inner,) = optimizer_state.inner_optimizers(actor.optimizer)
    counts = [state["step"] for state in inner.state.values()]
    assert len({count.data_ptr() for count in counts}) == len(counts)
    assert {float(count) for count in counts} == {1.0}


@pytest.mark.usefixtures("one_rank")
def test_optimizer_name_names_the_implementation():
    assert (
        optimizer_name(new_actor().optimizer)
        == optimizer_name(new_actor("bfloat16").optimizer)
        == "torch AdamW (fused)"
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", FULL)
def test_full_disk_during_a_save_costs_only_that_checkpoint(tmp_path, kind):
    actor = new_actor()
    update(actor, 0)
    cases.save(actor, _made(tmp_path / "probe"))
    one = sum(path.stat().st_size for path in (tmp_path / "probe").rglob("*"))
    disk = _made(tmp_path / "disk")
    with small_disk(disk, 4 * one if kind == "tmpfs" else one // 2, kind) as full:
        store = CheckpointStore(disk / "checkpoints", keep=2)
        store.save(1, actor, {})
        store.finish()
        first = store.reports()
        filler = disk / "filler"
        if kind == "tmpfs":
            assert not first[0].error
            filler.write_bytes(b" " * int(2.5 * one))
        update(actor, 1)
        store.save(2, actor, {})
        store.finish()
        (report,) = store.reports()
        assert report.error.startswith(full) and "\n" not in str(report)
        if kind != "tmpfs":
            return  # the limit also hits the first save
        assert [path.name for path in store.root.iterdir()] == ["step_1"]
        filler.unlink()
        store.save(2, actor, {})
        store.finish()
        assert not store.reports()[0].error
        found = newest_intact(store.root).path
        assert found == store.root / "step_2"
        resumed = new_actor()
        resumed.load(store.actor_directory(found))
        assert update(resumed, 2) == update(actor, 2)


def _made(path: Path) -> Path:
    path.mkdir()
    return path
