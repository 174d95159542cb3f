"""Policy ``local``: the queue and what a worker does not have of the prompt, as one sum."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from services.gateway.core.index.fetches import Hit
from services.gateway.core.routing.decision_record import record_of
from services.gateway.core.routing.decision_record import replay as decide_again
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role
from shared.ids import Incarnation
from shared.predict.step_time import StepFit
from tests.support.routing import a_mesh, decide

FIT = StepFit(constant_s=0.001, token_s=0.001, num_steps=100)
"""1,000 tokens a second."""


def a_known_mesh(queues_s: list[float], fit: StepFit = FIT) -> PeerTable:
    """Prefill workers 1, 2, ... with these queues, all of one speed, and one decode worker."""
    table = a_mesh(num_prefill=len(queues_s), num_decode=1)
    for queue_s, worker in zip(queues_s, table.all(Role.PREFILL), strict=True):
        status = replace(worker.status, queue_s=queue_s, prompt_steps=fit)
        worker.report(replace(status, pending_tokens=round(queue_s * 1_000)), 0.0)
    return table


def chosen(table: PeerTable, num_tokens: int, cached: dict[int, int]) -> int:
    request = RouteRequest(
        num_tokens=num_tokens,
        max_new_tokens=1,
        cached={
            worker.place: Hit(tokens, tokens)
            for incarnation, tokens in cached.items()
            if (worker := table.get(Incarnation(incarnation))) is not None
        },
    )
    decision = decide("local", table, 0.5, request)
    record = json.loads(json.dumps(record_of(decision, attempt=0, at_s=0.0)))
    assert decide_again(record) == []
    return int(decision.prefill)


@pytest.mark.parametrize("fit", [FIT, StepFit()], ids=["seconds", "tokens"])
@pytest.mark.parametrize(
    ("queues_s", "cached", "wanted"),
    [
        ([0.0, 0.0, 0.0], {2: 800}, 2),  # where its beginning is
        ([0.0, 0.5, 0.0], {2: 800}, 2),  # also behind a queue that costs less than computing it
        ([1.2, 1.2, 0.0], {2: 800}, 3),  # but a busy holder is left for an idle worker
        ([0.5, 0.4, 0.1], {}, 3),  # nobody has any of it
        ([0.0, 0.0, 0.2], {1: 100, 2: 400, 3: 900}, 3),
        ([0.0, 0.0, 0.0], {1: 1_000, 2: 900}, 1),  # of all of it the last token is computed
    ],
)
def test_of_queue_and_missing_tokens_the_least_sum_wins(
    queues_s: list[float], cached: dict[int, int], wanted: int, fit: StepFit
) -> None:
    """1,000 tokens are a second. Where a speed is not known tokens are compared, to the same end.
    Each decision comes out of its record again."""
    assert chosen(a_known_mesh(queues_s, fit), 1_000, cached) == wanted


def test_the_same_for_all_is_taken_in_turn() -> None:
    """A first block that every prompt has sends nobody everything."""
    table, policy = a_known_mesh([0.0, 0.0, 0.0]), POLICIES["local"]()
    request = RouteRequest(
        num_tokens=1_000,
        max_new_tokens=1,
        cached={worker.place: Hit(512, 512) for worker in table.all(Role.PREFILL)},
    )
    decisions = [decide(policy, table, 0.5, request) for _ in range(6)]
    assert sorted(it.prefill for it in decisions) == [1, 1, 2, 2, 3, 3]
