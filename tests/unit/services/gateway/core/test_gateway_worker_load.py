"""A worker's load at the gateway: its report plus the orders that the report has not seen."""

from __future__ import annotations

import random

import pytest

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.worker import Role, WorkerStatus
from shared.ids import StreamId
from tests.support.routing import a_worker


def status(seen: int, *, tokens: int = 0, blocks: int = 0) -> WorkerStatus:
    return WorkerStatus(pending_tokens=tokens, reserved_blocks=blocks, seen=StreamId(seen))


@pytest.mark.parametrize("seed", range(20))
def test_load_is_the_report_and_what_it_has_not_seen(seed: int) -> None:
    """Orders, first tokens, ends, cancels, losses and reports in any order, late and repeated
    ones: after each the sum is that of a plain list of the open orders."""
    source = random.Random(seed)
    worker = a_worker(Role.PREFILL, 1)
    open_orders: dict[int, list[int]] = {}
    report, last_id = status(0), 0
    for _ in range(300):
        event = source.choice(["sent", "sent", "computed", "ended", "report", "lost"])
        some_id = StreamId(source.choice([*open_orders, last_id, 0]))
        if event == "sent":
            last_id += source.randrange(1, 3)
            order = open_orders[last_id] = [source.randrange(1, 50), source.randrange(1, 5)]
            num_tokens, num_blocks = order
            worker.sent(
                Role.PREFILL, StreamId(last_id), num_tokens=num_tokens, num_blocks=num_blocks
            )
        elif event == "computed":
            worker.computed(some_id)
            open_orders.get(some_id, [0])[0] = 0
        elif event == "ended":
            worker.ended(some_id)
            open_orders.pop(some_id, None)
        elif event == "report":
            report = status(
                source.randrange(last_id + 1),
                tokens=source.randrange(99),
                blocks=source.randrange(64),
            )
            worker.report(report)
        elif source.random() < 0.1:
            worker.lost()
            open_orders.clear()
        unseen = [o for stream_id, o in open_orders.items() if stream_id > report.seen]
        assert worker.pending_tokens == report.pending_tokens + sum(o[0] for o in unseen)
        assert worker.reserved_blocks == report.reserved_blocks + sum(o[1] for o in unseen)
        assert worker.reserved_share == worker.reserved_blocks / 64


def test_a_worker_that_joins_anew_has_reported_nothing() -> None:
    """Every order that is open counts until its first report says otherwise."""
    table = PeerTable()
    worker = a_worker(Role.PREFILL, 1)
    table.join(worker)
    worker.sent(Role.PREFILL, StreamId(1), num_tokens=100, num_blocks=7)
    worker.report(status(1, tokens=60, blocks=7))
    assert worker.pending_tokens == 60
    again = a_worker(Role.PREFILL, 1)
    table.join(again)
    assert (again.pending_tokens, again.reserved_blocks) == (100, 7)
    again.report(status(1, tokens=60, blocks=7))
    assert (again.pending_tokens, again.reserved_blocks) == (60, 7)
