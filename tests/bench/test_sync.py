"""`arpo bench sync`, shortened: every transport delivers new weights to a real engine within two buckets of memory.

`make test` covers pushes in tests/weights; these campaigns cover their memory.
"""

import pytest

from arpo_megatron.bench.resharding import KINDS, LAYOUTS
from arpo_megatron.bench.sync import TRANSPORTS, bench_sync

BUCKET_MIB = 64
pytestmark = pytest.mark.slow_campaign


@pytest.mark.parametrize("tensor", [1, 2])
def test_transport_delivers_weights_within_two_buckets(tensor, tmp_path):
    figures = bench_sync(200, tensor, BUCKET_MIB, 1, tmp_path)
    assert figures["model_bytes"] >= 200e6
    for share in ("share_of_floor", "share_of_floor_verified"):
        assert figures[share] == figures["transports"]["network"][share]
    for name in TRANSPORTS:
        found = figures["transports"][name]
        assert len(found["push_s"]) == len(found["verified_push_s"]) == len(found["floor_s"]) == 1
        (floor,), (push,), (verified,) = found["floor_s"], found["push_s"], found["verified_push_s"]
        assert push > found["probe_s"][0] > 0, name
        assert found["share_of_floor"] == pytest.approx(floor / push, rel=0.05), name  # all values are rounded
        assert found["share_of_floor_verified"] == pytest.approx(floor / verified, rel=0.05), name
        assert found["probe_gap"] < 1e-4, name
        assert found["tensors_verified"] >= figures["model_bytes"] / (BUCKET_MIB * 2**20)
        for process in ("peak_extra_bytes", "engine_peak_extra_bytes"):  # trainer rank 0, and the engine
            assert found[process] <= found["two_buckets_bytes"], (name, process, found)
    assert not list(tmp_path.iterdir())
    assert figures["resharding"].keys() == LAYOUTS.keys()
    for layout in figures["resharding"].values():
        for kind in KINDS:
            found = layout[kind]
            assert found["bytes_over_own_shard"] == 1
            assert found["largest_buffer_over_bucket"] <= 1
            (exchange,), (push,) = found["exchange_s"], found["push_s"]
            assert found["exchange_over_push"] == pytest.approx(exchange / push, rel=0.05)
    of_pipeline = figures["resharding"]["TP2 x PP2"]
    assert figures["exchange_over_push"] == of_pipeline["network"]["exchange_over_push"]
    assert figures["exchange_over_push_ipc"] == of_pipeline["ipc"]["exchange_over_push"]
    assert figures["bytes_over_own_shard"] == 1
    assert figures["largest_buffer_over_bucket"] <= 1


def test_embedding_of_four_buckets_needs_two(tmp_path):
    bucket_mib, vocabulary = 32, 24576
    found = bench_sync(200, 2, bucket_mib, 1, tmp_path, vocabulary)["transports"]
    for name in TRANSPORTS:
        assert found[name]["probe_gap"] < 1e-4, name
        assert found[name]["peak_extra_bytes"] <= 2 * bucket_mib * 2**20, (name, found[name])
    assert found["network"]["engine_peak_extra_bytes"] <= 2 * bucket_mib * 2**20
