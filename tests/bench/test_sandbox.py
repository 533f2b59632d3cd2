"""An isolated python call costs a fraction of the interpreter that it replaces."""

from tools_sandbox.bench.python import bench_python


def test_an_isolated_call_costs_less_than_a_cold_interpreter() -> None:
    figures = bench_python(cold_calls=4, in_flight=4)
    # A fifth of what `arpo bench sandbox` is held to on a quiet machine: this one may have a load of 20.
    assert float(str(figures["latency_ratio"])) >= 4
    assert float(str(figures["throughput_ratio"])) >= 2
    assert figures["isolation"] in ("contained", "full")
