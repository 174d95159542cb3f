"""Decisions as records: every policy, decided again from JSON alone, takes the same pair."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.routing.decision_record import record_of, replay
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.routing import POLICIES, route
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role
from shared.errors import InvalidRequest
from shared.ids import Incarnation, StreamId
from tests.support.routing import a_mesh, a_worker


def a_busy_mesh(seed: int) -> PeerTable:
    """Workers of all kinds, with reports and with orders that these have not seen."""
    draws = random.Random(seed)
    table = a_mesh(draws.randint(1, 5), draws.randint(1, 5))
    if draws.random() < 0.5:
        both = a_worker(Role.DECODE, 900, serves=(Role.PREFILL, Role.DECODE))
        decodes = [it.incarnation for it in table.all(Role.DECODE)]
        table.join(both)
        status = replace(both.status, paired=frozenset([both.incarnation, *decodes]))
        table.report(both, status)
    for number, worker in enumerate(table.workers):
        status = replace(
            worker.status,
            pending_tokens=draws.choice([0, 0, 100, draws.randrange(20_000)]),
            reserved_blocks=draws.choice([0, 0, draws.randrange(64)]),
            num_waiting=draws.randrange(3),
            num_running=draws.randrange(3),
            num_prompts=draws.randrange(2),
            num_answers=draws.randrange(2),
        )
        table.report(worker, status, now=1.0)
        if draws.random() < 0.5:
            role = worker.serves[0]
            worker.sent(role, StreamId(1 + number), num_tokens=50, num_blocks=3, now=1.5)
    return table


@pytest.mark.parametrize("name", POLICIES)
@given(seed=st.integers(0, 10_000), draw=st.floats(0, 1, exclude_max=True))
def test_a_decision_is_made_again_from_its_record(name: str, seed: int, draw: float) -> None:
    """After any history of decisions, whoever was to be avoided, and whatever happens to the
    workers later."""
    table, policy, draws = a_busy_mesh(seed), POLICIES[name](), random.Random(seed + 1)
    for _ in range(draws.randrange(6)):
        route(policy, RouteRequest(num_tokens=10, max_new_tokens=5), table.sides, draws.random())
    avoid = frozenset(Incarnation(it) for it in (1, 100) if draws.random() < 0.3)
    request = RouteRequest(
        num_tokens=draws.randrange(1, 400),
        max_new_tokens=draws.randrange(1, 600),
        avoid=avoid,
        affinity=draws.getrandbits(64),
    )
    decision = route(policy, request, table.sides, draw)
    assert decision is not None
    for worker in table.workers:  # what comes later is not in the record
        worker.report(replace(worker.status, pending_tokens=7, reserved_blocks=63))
    record = json.loads(json.dumps(record_of(decision, attempt=0, at_s=2.0)))
    assert replay(record) == []


def a_record(name: str = "least_loaded") -> dict[str, object]:
    table = a_mesh(2, 2)
    decision = route(
        POLICIES[name](), RouteRequest(num_tokens=10, max_new_tokens=5), table.sides, 0.3
    )
    assert decision is not None
    return json.loads(json.dumps(record_of(decision, attempt=0, at_s=0.0)))


def test_a_record_that_was_changed_is_told() -> None:
    """Another load gives another score and another pair: both are said."""
    record = a_record()
    record["prefills"][0]["pending_tokens"] = 500  # type: ignore[index]
    score, taken = replay(record)
    assert "had score 0, and has 500 now" in score
    assert taken.endswith(f"now is {2:016x})")


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "conductor of a later release"},
        {"prefills": []},
        {"partners": [[9], [9]]},
        {"policy": "random", "random": "x"},
        {"avoid": ["no hex"]},
        {"memory": {"x": 1}},
        {"prefills": None},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, object]) -> None:
    """A sentence with the remedy, and no traceback."""
    with pytest.raises(InvalidRequest, match=r"policy|no decision's record"):
        replay(a_record("round_robin") | change)
    with pytest.raises(InvalidRequest, match="no decision's record"):
        replay({})
