"""The numbers of one prefill or decode worker, in Prometheus' terms.

Everything is observed per step, per request or per scrape; nothing per token. Each worker has a
registry of its own, so that a mesh in one process keeps its workers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.telemetry.loop_lag import LagWindow

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LAG_BUCKETS = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01,
    0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0,
)  # fmt: skip
"""Fine round the goal: 99 % below 5 ms."""
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker is busy with at one instant; the body of the status it sends to gateways.

    pending_tokens: prompt tokens queued or running. reserved_blocks: held by leases and sequences.
    step_s: moving mean of the step time. paired: incarnations of the decode workers whose canary
    crossed."""

    pending_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    step_s: float = 0.0
    is_draining: bool = False
    paired: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHoldings:
    """What a worker keeps open at one instant: the same again whenever its requests are over, else
    something leaks.

    sessions: gateways that talk to it. endpoints: of the transport, closing ones included.
    transfers: not settled. tasks: of the event loop."""

    sessions: int = 0
    endpoints: int = 0
    transfers: int = 0
    free_slots: int = 0
    tasks: int = 0


class WorkerMetrics:
    """Counters and histograms that the shells feed, and gauges read when scraped: from ``load``,
    and from ``holdings``, which whoever puts the worker together sets."""

    def __init__(self, role: str, load: Callable[[], WorkerLoad]) -> None:
        self.registry = CollectorRegistry()
        prefix = f"pdmesh_{role}"
        self.step_seconds = Histogram(
            f"{prefix}_step_seconds", "Time of one engine step", buckets=STEP_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.step_tokens = Counter(
            f"{prefix}_step_tokens", "Token positions computed", registry=self.registry
        )
        self.step_rows = Counter(
            f"{prefix}_step_rows", "Rows (sequence shares) computed", registry=self.registry
        )
        self.cached_tokens = Counter(
            f"{prefix}_cached_tokens", "Prompt tokens found in the prefix cache",
            registry=self.registry,
        )  # fmt: skip
        self.preemptions = Counter(
            f"{prefix}_preemptions", "Sequences that lost their blocks to others",
            registry=self.registry,
        )  # fmt: skip
        self.requests = Counter(
            f"{prefix}_requests", "Attempts by how they ended", ["outcome"], registry=self.registry
        )
        self.transfer_bytes = Counter(
            f"{prefix}_transfer_bytes", "KV bytes pushed or received", registry=self.registry
        )
        self.wait_seconds = Histogram(
            f"{prefix}_wait_seconds", "Wait for the first step or grant", buckets=WAIT_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.loop_lag_seconds = Histogram(
            f"{prefix}_loop_lag_seconds", "Lateness of the loop's timers", buckets=LAG_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.loop_lag = LagWindow()
        self.holdings: Callable[[], WorkerHoldings] = WorkerHoldings
        self.registry.register(_LoadCollector(prefix, load, lambda: self.holdings()))

    def observe_loop_lag(self, lag_s: float) -> None:
        """Take in how late a timer of the loop was."""
        self.loop_lag_seconds.observe(lag_s)
        self.loop_lag.add(lag_s)


class _LoadCollector(Collector):
    def __init__(
        self,
        prefix: str,
        load: Callable[[], WorkerLoad],
        holdings: Callable[[], WorkerHoldings],
    ) -> None:
        self._prefix = prefix
        self._load = load
        self._holdings = holdings

    def collect(self) -> Iterator[Metric]:
        load, holdings = self._load(), self._holdings()
        for name, text, value in (
            ("pending_tokens", "Prompt tokens queued or running", load.pending_tokens),
            ("waiting", "Sequences waiting", load.num_waiting),
            ("running", "Sequences running", load.num_running),
            ("free_blocks", "KV blocks free or only cached", load.free_blocks),
            ("reserved_blocks", "KV blocks held by leases and sequences", load.reserved_blocks),
            ("quarantined_blocks", "KV blocks a transfer may still touch", load.quarantined_blocks),
            ("draining", "1 while taking nothing new", int(load.is_draining)),
            ("pairs", "Partners whose canary crossed", len(load.paired)),
            ("sessions", "Gateways that talk to this worker", holdings.sessions),
            ("endpoints", "Transport endpoints, closing ones included", holdings.endpoints),
            ("transfers", "KV transfers that are not settled", holdings.transfers),
            ("free_slots", "Staging slots free", holdings.free_slots),
            ("tasks", "Tasks of the event loop", holdings.tasks),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)


class MovingMean:
    """Exponential moving mean; the first value counts whole."""

    def __init__(self, weight: float = 0.1) -> None:
        self.value = 0.0
        self._weight = weight
        self._has_value = False

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.value += (value - self.value) * (self._weight if self._has_value else 1.0)
        self._has_value = True
