"""Metrics of the service for /metrics (Prometheus text format)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """The metrics of one service. Labels hold only names of tools and reasons, so their number is bounded."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = Counter("tools_sandbox_answers", "Calls answered.", ["tool", "status"], registry=self._registry)
        self.refusals = Counter(
            "tools_sandbox_refusals", "Calls without an answer, by reason.", ["reason"], registry=self._registry
        )
        self.execution = Histogram(
            "tools_sandbox_execution_seconds",
            "Wall time of executions, without queueing.",
            ["tool"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.waiting = Histogram(
            "tools_sandbox_waiting_seconds",
            "Queueing time of executions.",
            ["tool"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        ProcessCollector(namespace="tools_sandbox", registry=self._registry)

    def watch(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at every request."""
        Gauge(f"tools_sandbox_{name}", meaning, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
