"""The numbers of the gateway's client side, in Prometheus' terms: calls, whatever they ask for.

What becomes of answers is in ``answer_metrics.py``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from shared.telemetry.tallies import Counts


class ClientMetrics:
    """What both doors feed; rendered by ``/metrics`` from ``registry``."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.requests = Counts(
            "pdmesh_gateway_requests",
            "Calls by route and how they ended (ok, cancelled, or the error type)",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.num_running = 0
        Gauge(
            "pdmesh_gateway_requests_running",
            "Calls in progress, this scrape among them",
            registry=self.registry,
        ).set_function(lambda: self.num_running)
