"""What a process says of itself to Prometheus: which build it is, and what it takes of its machine.

Process numbers have the names that Prometheus' own clients give them. A mesh in one process has
them once a service, all the same.
"""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics

from shared.version import VERSION


def register_process_metrics(registry: CollectorRegistry, service: str, incarnation: int) -> None:
    """Add a service's build, incarnation and process numbers to its registry.

    Also leaves out the ``_created`` series, in all registries of the process: Prometheus makes
    nothing of them, and they would double every counter."""
    disable_created_metrics()
    Gauge(
        f"pdmesh_{service}_build_info",
        "Always 1; which build this is, and the incarnation that receipts and logs name",
        ["version", "python_version", "incarnation"],
        registry=registry,
    ).labels(VERSION, platform.python_version(), f"{incarnation:016x}").set(1)
    ProcessCollector(registry=registry)
