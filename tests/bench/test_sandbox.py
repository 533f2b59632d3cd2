"""An isolated python call costs a fraction of the cold interpreter that it replaces."""

import pytest

from tools_sandbox.bench.python import bench_python


@pytest.mark.slow_campaign
def test_isolated_call_costs_less_than_a_cold_interpreter() -> None:
    figures = bench_python(cold_calls=4, in_flight=4)
    # A fifth of the goals of `arpo bench sandbox`: this machine may have a load of 20.
    assert float(str(figures["latency_ratio"])) >= 4
    assert float(str(figures["throughput_ratio"])) >= 2
    assert figures["isolation"] in ("contained", "full")
