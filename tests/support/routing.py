"""Workers, tables and decisions for tests of routing and of all that reads a table."""

from __future__ import annotations

from typing import Any

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.routing import POLICIES, RouteDecision, Seen, route
from services.gateway.core.routing.sides import RouteRequest, RoutingPolicy, Scores, Sides
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec

LAYOUT = KvLayout(dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8)
REQUEST = RouteRequest(num_tokens=10, max_new_tokens=5)


def a_worker(role: Role, incarnation: int, **changes: object) -> Worker:
    """Return a worker that has sessions and has reported nothing. changes: of its fields."""
    model = ModelSpec(
        name="m", fingerprint=b"f" * 32, vocab_size=100, max_model_len=1 << 20, dtype="float32",
        engine="torch",
    )  # fmt: skip
    fields: dict[str, object] = {
        "role": role,
        "incarnation": Incarnation(incarnation),
        "host": "h",
        "port": 1,
        "model": model,
        "layout": LAYOUT,
        "num_blocks": 64,
        "block_size": 16,
    }
    worker = Worker(**(fields | changes))  # type: ignore[arg-type]
    worker.is_connected = True
    return worker


def a_mesh(num_prefill: int = 2, num_decode: int = 2) -> PeerTable:
    """Return a table of prefill workers 1, 2, ... and decode workers 100, 101, ..., all paired."""
    table = PeerTable()
    decodes = [Incarnation(100 + i) for i in range(num_decode)]
    for i in range(num_prefill):
        worker = a_worker(Role.PREFILL, i + 1)
        worker.status = WorkerStatus(paired=frozenset(decodes))
        table.join(worker)
    for incarnation in decodes:
        table.join(a_worker(Role.DECODE, incarnation))
    return table


def decide(
    policy: str | RoutingPolicy,
    table: PeerTable,
    draw: float = 0.0,
    request: RouteRequest = REQUEST,
    **fields: Any,
) -> RouteDecision:
    """One decision, of a fresh policy if it is named. fields: of the request."""
    made = POLICIES[policy]() if isinstance(policy, str) else policy
    decision = route(made, request._replace(**fields), table.sides, draw)
    assert decision is not None
    return decision


NOBODY = Sides([], [], [])


def a_decision(prefill: int, decode: int) -> RouteDecision:
    """The decision for this pair, of which nothing else matters."""
    return RouteDecision(
        policy="test",
        prefill=Incarnation(prefill),
        decode=Incarnation(decode),
        places=(0, 0),
        sides=NOBODY,
        scores=Scores([0.0], [0.0]),
        prefill_pool="prompt",
        decode_pool="token",
        seen=Seen(RouteRequest(1, 1), 0.0, None, ()),
    )
