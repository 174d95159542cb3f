"""The numbers of the gateway's mesh side, in Prometheus' terms: read when somebody scrapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.gateway.core.admission.admission import REASONS
from services.gateway.core.routing.pools import Pool, pool_of
from services.gateway.core.worker import Role
from services.gateway.workers.generation import GatewayMesh
from services.gateway.workers.membership import Membership
from shared.telemetry.tallies import Scraped
from shared.telemetry.worker import LAG_BUCKETS


def register_mesh_metrics(
    registry: CollectorRegistry, mesh: GatewayMesh, members: Membership
) -> Histogram:
    """Add the mesh's gauges to a registry; return the histogram of the loop's lag, to be fed."""
    Scraped(registry, lambda: _of_mesh(mesh, members))
    return Histogram(
        "pdmesh_gateway_loop_lag_seconds",
        "Lateness of the loop's timers",
        buckets=LAG_BUCKETS,
        registry=registry,
    )


def _of_mesh(mesh: GatewayMesh, members: Membership) -> Iterator[Metric]:
    counts, sessions = mesh.statistics, members.sessions.values()
    num_legs = sum(session.num_legs for session in sessions)
    for name, text, value in (
        ("answers_running", "Answers being generated", counts.num_running),
        ("answers_waiting", "Answers that wait for a place", counts.num_waiting),
        ("pairs", "Pairs of workers that take new work", members.table.sides.num_pairs),
        ("ready", "1 while a request would be taken", int(mesh.is_ready)),
        ("legs", "Parts of answers in hand at workers", num_legs),
        ("asyncio_tasks", "Tasks of the event loop", len(asyncio.all_tasks())),
    ):
        yield GaugeMetricFamily(f"pdmesh_gateway_{name}", text, value=value)
    refused = CounterMetricFamily(
        "pdmesh_gateway_answers_refused",
        "Answers for which there was no place in time, or whose limits could not be kept",
        labels=["reason"],
    )
    for reason in REASONS:
        refused.add_metric([reason], counts.refusals.get(reason, 0))
    yield refused
    prefixes = members.prefixes
    index = None if prefixes is None else prefixes.index
    yield GaugeMetricFamily(
        "pdmesh_gateway_prefix_index_bytes",
        "Memory of the index of who has which prefix",
        value=0 if index is None else index.num_bytes,
    )
    yield CounterMetricFamily(
        "pdmesh_gateway_prefix_index_resyncs",
        "Snapshots asked for because the index differed from what a worker has",
        value=0 if index is None else index.num_resyncs,
    )
    workers = GaugeMetricFamily("pdmesh_gateway_workers", "Workers joined", labels=["role"])
    usable = GaugeMetricFamily(
        "pdmesh_gateway_workers_usable", "Workers that take new work", labels=["role"]
    )
    for role in Role:
        found = members.table.all(role)
        workers.add_metric([role.value], len(found))
        usable.add_metric([role.value], sum(worker.is_usable for worker in found))
    yield workers
    yield usable
    pools = GaugeMetricFamily(
        "pdmesh_gateway_pool_workers", "Workers by what they are now", labels=["pool"]
    )
    now = Counter(pool_of(worker) for worker in members.table.workers)
    for pool in Pool:
        pools.add_metric([pool.value], now[pool])
    yield pools
    # What an autoscaler reads: only the gateway that decides says how many are wanted.
    wanted = GaugeMetricFamily(
        "pdmesh_gateway_workers_wanted", "Workers that the planner wants", labels=["role"]
    )
    planner = mesh.planner
    if planner is not None and planner.acts:
        for kind, num in planner.decision.wanted.items():
            wanted.add_metric([kind.value], num)
    yield wanted
