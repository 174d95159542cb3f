"""The numbers of the gateway's client side, in Prometheus' terms; observed per request, never per
token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0
)  # fmt: skip


class ClientMetrics:
    """Counters and histograms that both doors feed; rendered by ``/metrics`` from ``registry``."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.requests = Counter(
            "pdmesh_gateway_requests",
            "Requests by route and how they ended (ok, cancelled, or the error type)",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.running = Gauge(
            "pdmesh_gateway_requests_running", "Requests in progress", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "pdmesh_gateway_prompt_tokens",
            "Prompt tokens of answered requests",
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "pdmesh_gateway_completion_tokens", "Tokens sent to clients", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "pdmesh_gateway_first_token_seconds",
            "TTFT: arrival of the request to its first token leaving the gateway",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "pdmesh_gateway_request_seconds",
            "Arrival to last token",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
