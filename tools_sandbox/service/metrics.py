"""What the service counts, for /metrics (Prometheus text format)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """One registry a service. Labels hold names of tools and reasons only: their number is bounded."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = Counter("tools_sandbox_answers", "Calls answered.", ["tool", "status"], registry=self._registry)
        self.refusals = Counter(
            "tools_sandbox_refusals", "Calls without answer, by reason.", ["reason"], registry=self._registry
        )
        self.execution = Histogram(
            "tools_sandbox_execution_seconds",
            "Wall time of executions, without waiting.",
            ["tool"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.waiting = Histogram(
            "tools_sandbox_waiting_seconds",
            "Time that executions waited for a place.",
            ["tool"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        ProcessCollector(namespace="tools_sandbox", registry=self._registry)

    def watch(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A number that is read when asked for."""
        Gauge(f"tools_sandbox_{name}", meaning, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)
