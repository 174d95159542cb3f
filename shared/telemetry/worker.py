"""The numbers of one prefill or decode worker, in Prometheus' terms.

Everything is observed per step, per request or per scrape; nothing per token. Each worker has a
registry of its own, so that a mesh in one process keeps its workers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from shared.telemetry.loop_lag import BLOCKED_S
from shared.telemetry.tallies import Scraped
from shared.worker_status import WorkerStatus

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LAG_BUCKETS = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01,
    0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0,
)  # fmt: skip
"""Fine round the goal: 99 % below 5 ms."""
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TRANSFER_BUCKETS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
SPEED_BUCKETS = (
    1e6, 3e6, 1e7, 3e7, 1e8, 2e8, 5e8, 1e9, 2e9, 3e9, 5e9, 7.5e9, 1e10, 2e10, 5e10, 1e11, 2e11, 5e11
)  # fmt: skip
"""Bytes a second, from slow TCP to NVLink."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeed:
    """One ready pair, as prefill measures it. decode: host:port."""

    decode: str
    lane: str
    bytes_per_s: float


class WorkerMetrics:
    """What both roles count: counters and histograms that the shells feed, and gauges read when
    scraped, from ``load`` and from ``holdings``, which whoever puts the worker together sets."""

    def __init__(
        self,
        role: str,
        load: Callable[[], WorkerStatus] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """load: None = gauges and the loop's lateness are another's, of the same worker. registry:
        of that one."""
        self.registry = registry or CollectorRegistry()
        self.prefix = f"pdmesh_{role}"
        counter, histogram = self._counter, self._histogram
        self.step_seconds = histogram("step_seconds", "Time of one engine step", STEP_BUCKETS)
        self.step_tokens = counter("step_tokens", "Token positions computed")
        self.step_rows = counter("step_rows", "Rows (sequence shares) computed")
        self.prompt_tokens = counter("prompt_tokens", "Tokens looked up in the prefix cache")
        self.cached_tokens = counter("cached_tokens", "Tokens found in the prefix cache")
        self.tier_stored = counter("tier_blocks_stored", "KV blocks copied below the pool", "tier")
        self.tier_loaded = counter(
            "tier_tokens_loaded", "Tokens whose KV came back from there", "tier"
        )
        self.tier_lost = counter(
            "tier_blocks_lost", "KV blocks that were to be copied there, and were not", "tier"
        )
        self.tier_damaged = counter(
            "tier_blocks_damaged", "KV blocks there that were not what was written", "tier"
        )
        for tiers in (self.tier_stored, self.tier_loaded, self.tier_lost, self.tier_damaged):
            for tier in ("dram", "ssd"):
                tiers.labels(tier)  # A tier that never had anything reads 0.
        self.requests = counter("requests", "Attempts by how they ended", "outcome")
        self.queue_seconds = histogram(
            "queue_time_seconds", "Wait for the first step, or for blocks", WAIT_BUCKETS
        )
        self.loop_lag_seconds = histogram(
            "loop_lag_seconds", "Lateness of the loop's timers", LAG_BUCKETS
        )
        self._lag_s = 0.0  # of the loop, when it was last looked at
        self.holdings: Callable[[], WorkerHoldings] = WorkerHoldings
        if load is not None:
            # Asked for at each scrape: who puts the worker together sets it after this.
            Scraped(self.registry, lambda: _of_load(self.prefix, load(), self.holdings()))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        name = f"{self.prefix}_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def observe_loop_lag(self, lag_s: float) -> None:
        """Take in how late a timer of the loop was."""
        self.loop_lag_seconds.observe(lag_s)
        self._lag_s = lag_s

    @property
    def why_blocked(self) -> str:
        """One sentence if the loop stood still just now, else ''."""
        return (
            f"the event loop stood still for {self._lag_s:.1f} s"
            if self._lag_s >= BLOCKED_S
            else ""
        )

    def preempted(self, number: int) -> None:
        """Take in that so many sequences lost their blocks; prompts for other workers never do."""


class PrefillMetrics(WorkerMetrics):
    """A prefill worker's. pairs: read when scraped; whoever puts the worker together sets it."""

    def __init__(
        self,
        load: Callable[[], WorkerStatus] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        super().__init__("prefill", load, registry)
        self._transfer_bytes = self._counter("transfer_bytes", "KV bytes pushed", "lane")
        self._transfer_seconds = self._histogram(
            "transfer_seconds", "First frame sent to last acknowledgement", TRANSFER_BUCKETS, "lane"
        )
        self._transfer_exposed = self._histogram(
            "transfer_exposed_seconds",
            "Token sampled to last acknowledgement: what no compute hid",
            TRANSFER_BUCKETS,
            "lane",
        )
        self._transfer_speed = self._histogram(
            "transfer_bytes_per_second",
            "Bytes of one transfer over its time, of which some is compute that it waited for",
            SPEED_BUCKETS,
            "lane",
        )
        self.pairs: Callable[[], Sequence[PairSpeed]] = tuple
        Scraped(self.registry, lambda: _of_pairs(self.prefix, self.pairs()))

    def transferred(
        self, num_bytes: int, *, transfer_s: float, exposed_s: float, lane: str
    ) -> None:
        """Take in a transfer that is acknowledged; one that had nothing to move is none."""
        if not num_bytes:
            return
        self._transfer_bytes.labels(lane).inc(num_bytes)
        self._transfer_seconds.labels(lane).observe(transfer_s)
        self._transfer_exposed.labels(lane).observe(exposed_s)
        if transfer_s > 0:
            self._transfer_speed.labels(lane).observe(num_bytes / transfer_s)


class DecodeMetrics(WorkerMetrics):
    """A decode worker's."""

    def __init__(
        self,
        load: Callable[[], WorkerStatus] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        super().__init__("decode", load, registry)
        self.preemptions = self._counter(
            "preemptions", "Sequences that lost their blocks to others"
        )
        self.transfer_bytes = self._counter("transfer_bytes", "KV bytes received", "lane")
        self.transfer_seconds = self._histogram(
            "transfer_seconds",
            "First frame announced to last one placed",
            TRANSFER_BUCKETS,
            "lane",
        )

    def preempted(self, number: int) -> None:
        self.preemptions.inc(number)


def _of_load(prefix: str, load: WorkerStatus, holdings: WorkerHoldings) -> Iterator[Metric]:
    blocks = {
        "free": load.free_blocks,
        "reserved": load.reserved_blocks,
        "quarantined": load.quarantined_blocks,
    }
    num_blocks = sum(blocks.values())
    usage = 1 - load.free_blocks / num_blocks if num_blocks else 0.0
    for name, text, value in (
        ("pending_tokens", "Prompt tokens queued or running", load.pending_tokens),
        ("requests_waiting", "Sequences and reservations that wait", load.num_waiting),
        ("requests_running", "Sequences that run", load.num_running),
        ("kv_cache_usage_ratio", "Share of the KV blocks that is not free", usage),
        ("draining", "1 while taking nothing new", int(load.is_draining)),
        ("sessions", "Gateways that talk to this worker", holdings.sessions),
        ("endpoints", "Transport endpoints, closing ones included", holdings.endpoints),
        ("transfers_open", "KV transfers that are not settled", holdings.transfers),
        ("staging_slots_free", "Staging slots free", holdings.free_slots),
        ("asyncio_tasks", "Tasks of the event loop", holdings.tasks),
    ):
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)
    states = GaugeMetricFamily(
        f"{prefix}_kv_blocks",
        "KV blocks: free (or only cached), reserved (by leases and sequences), quarantined (a "
        "transfer may still touch them)",
        labels=["state"],
    )
    for state, number in blocks.items():
        states.add_metric([state], number)
    yield states


def _of_pairs(prefix: str, pairs: Sequence[PairSpeed]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{prefix}_pairs", "Decode workers whose canary crossed", value=len(pairs)
    )
    speeds = GaugeMetricFamily(
        f"{prefix}_pair_bytes_per_second",
        "Speed of each pair: of its canary, then a moving mean over large frames",
        labels=["decode", "lane"],
    )
    for pair in pairs:
        speeds.add_metric([pair.decode, pair.lane], pair.bytes_per_s)
    yield speeds
