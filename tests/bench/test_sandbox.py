"""An isolated python call costs a fraction of the interpreter that it replaces."""

from tools_sandbox.bench_python import bench_python


def test_an_isolated_call_is_an_order_of_magnitude_cheaper_than_a_cold_interpreter() -> None:
    figures = bench_python(cold_calls=4, in_flight=4)
    # Half of what it is held to on a quiet machine: the suite runs two tests at a time.
    assert float(str(figures["latency_ratio"])) >= 10
    assert float(str(figures["throughput_ratio"])) >= 5
    assert figures["isolation"] in ("contained", "full")
