"""`arpo bench load` at its smallest size: memory of loading and exporting stays within the bound."""

import pytest

from arpo_megatron.bench.load import bench_load
from arpo_megatron.errors import UserError


@pytest.mark.slow_campaign
def test_rank_needs_its_shard_and_two_tensors_at_most(tmp_path):
    figures = bench_load(0.5, tensor=2, pipeline=1, directory=tmp_path)
    assert figures["model_bytes"] >= 0.5e9
    assert sum(figures["shard_bytes"]) >= figures["model_bytes"]
    assert figures["bit_exact"]
    assert figures["within_bound"], figures
    assert not list(tmp_path.iterdir())


def test_layout_that_does_not_divide_the_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"query heads \(32\) cannot be divided by parallel.tensor=3: give"):
        bench_load(0.1, tensor=3, pipeline=1, directory=tmp_path)
