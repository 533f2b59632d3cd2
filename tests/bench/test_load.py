"""`arpo bench load` keeps its promise at a size that a test can afford; the full size is for the command."""

import pytest

from arpo_megatron.bench.load import bench_load
from arpo_megatron.errors import UserError


def test_no_rank_needs_more_than_its_shard_and_two_tensors_and_no_bit_changes(tmp_path):
    figures = bench_load(0.5, tensor=2, pipeline=1, directory=tmp_path)
    assert figures["model_bytes"] >= 0.5e9
    assert sum(figures["shard_bytes"]) >= figures["model_bytes"]
    assert figures["bit_exact"]
    assert figures["within_bound"], figures
    assert not list(tmp_path.iterdir())


def test_a_layout_that_does_not_fit_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"query heads \(32\) cannot be divided by parallel.tensor=3: give"):
        bench_load(0.1, tensor=3, pipeline=1, directory=tmp_path)
