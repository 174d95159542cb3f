"""What token 1 is expected to take, and when a worker is not believed any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.core.routing.expectations import (
    LEAST_ANSWERS,
    WRONG_S,
    EndedAnswer,
    Expectations,
)
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.ids import Incarnation, StreamId
from shared.predict.step_time import StepFit
from shared.predict.transfer import KvLink
from tests.support.routing import a_worker

FIT = StepFit(constant_s=0.1, token_s=0.01, num_steps=100)
"""A prompt of n tokens takes 0.1 + n / 100 s."""

W = Incarnation(1)


def a_prefill(queue_s: float = 0.0, *, now: float = 0.0, seen: int = 0) -> Worker:
    worker = a_worker(Role.PREFILL, 1)
    status = WorkerStatus(queue_s=queue_s, prompt_steps=FIT, seen=StreamId(seen), step_tokens=2048)
    worker.report(status, now)
    return worker


def order(worker: Worker, stream_id: int, num_tokens: int, now: float) -> None:
    worker.sent(Role.PREFILL, StreamId(stream_id), num_tokens=num_tokens, num_blocks=1, now=now)


def test_a_prediction_adds_up() -> None:
    """Queue as reported less what has passed, own orders that the report has not seen, the prompt,
    and the hand-over that other answers had."""
    expectations, decode = Expectations(), a_worker(Role.DECODE, 2)
    prefill = a_prefill(2.0, now=10.0, seen=1)
    order(prefill, 1, 1000, 9.9)  # seen
    order(prefill, 2, 40, 10.5)
    for seconds in (0.02, 0.03, 0.9):
        expectations.handed_over(seconds, is_colocated=False)
    expected = expectations.predict(prefill, decode, 90, 11.0)
    assert expected is not None
    assert expected[:4] == pytest.approx((1.0, 0.5, 1.0, 0.03))
    assert expected.ttft_s == pytest.approx(2.53)
    assert expected.transfer_s is None
    assert expected.num_output_tokens is None


def test_transfers_and_lengths_join_once_they_are_known() -> None:
    """After some answers the record says how long KV will move and the answer become."""
    expectations, decode, prefill = Expectations(), a_worker(Role.DECODE, 2), a_prefill()
    for number in range(1, 20):
        num_bytes = number * prefill.layout.token_bytes
        link = KvLink(prefill.incarnation, decode.incarnation, "tcp")
        expectations.transfers.observe(link, num_bytes, number)
        expectations.lengths.ended(90, 7)
    expected = expectations.predict(prefill, decode, 90, 1.0)
    assert expected is not None
    assert expected.transfer_s == pytest.approx(90, rel=0.01)
    assert expected.num_output_tokens == 7


def test_orders_wait_for_each_other_and_drain() -> None:
    """Each begins when the one before it ends, or when it comes; what is computed is gone, and time
    takes the rest."""
    worker = a_prefill(now=0.0)
    order(worker, 1, 90, 1.0)  # 1.0 s, until 2.0
    order(worker, 2, 90, 1.5)  # until 3.0
    assert worker.wait_s(1.5) == (0.0, pytest.approx(1.5))
    worker.computed(StreamId(1))
    assert worker.wait_s(2.0) == (0.0, pytest.approx(0.5))
    assert worker.wait_s(4.0) == (0.0, 0.0)
    order(worker, 3, 90, 5.0)
    assert worker.wait_s(5.0) == (0.0, pytest.approx(1.0))
    worker.ended(StreamId(3))
    assert worker.wait_s(5.0) == (0.0, 0.0)


def test_nothing_is_counted_twice() -> None:
    """Once a report counts an order, its seconds come from the report alone."""
    worker = a_prefill(now=0.0)
    order(worker, 1, 90, 0.0)
    assert sum(worker.wait_s(0.0)) == pytest.approx(1.0)
    worker.report(WorkerStatus(queue_s=0.8, prompt_steps=FIT, seen=StreamId(1)), 0.2)
    assert worker.wait_s(0.2) == (pytest.approx(0.8), 0.0)


def test_a_worker_without_step_times_is_not_predicted() -> None:
    """One of before, or one that has run too little: no number rather than a wrong one."""
    worker = a_worker(Role.PREFILL, 1)
    assert Expectations().predict(worker, a_worker(Role.DECODE, 2), 10, 0.0) is None
    assert not worker.is_predictable
    assert a_prefill().is_predictable


def answers(
    expectations: Expectations, times: Iterator[float], factor: float, number: int
) -> list[bool | None]:
    return [
        expectations.answered(W, predicted_s=factor, actual_s=1.0, now=next(times))
        for _ in range(number)
    ]


def test_wrong_for_a_minute_is_not_believed_until_it_is_right_again() -> None:
    """Off by 40 %: nothing happens for 60 s, then it is told once; off by 20 %: it is told once
    that it may be, as soon as half of the last minute is right."""
    expectations, times = Expectations(), iter(range(1000))
    assert answers(expectations, times, 1.1, 30) == [None] * 30
    told = answers(expectations, times, 1.4, 100)
    assert told.count(False) == 1
    assert told.count(True) == 0
    # Half of the last minute are wrong from some 30 s on; 60 s later it is no longer believed.
    assert 75 < told.index(False) < 110
    assert expectations.error_p50(W, 130) == pytest.approx(0.4)
    told = answers(expectations, times, 0.8, 60)
    assert [it for it in told if it is not None] == [True]
    assert 25 < told.index(True) < 40


def test_a_few_bad_answers_say_nothing() -> None:
    """Fewer than eight in a minute are no median; and who has left is forgotten."""
    expectations = Expectations()
    for number in range(20):
        at = number * WRONG_S / (LEAST_ANSWERS - 2)
        assert expectations.answered(W, predicted_s=9.0, actual_s=1.0, now=at) is None
    assert expectations.error_p50(W, at) is None
    expectations.left(W)
    assert expectations.error_p50(W, at) is None


CAME = EndedAnswer(
    prefill=W,
    decode=Incarnation(2),
    is_whole=True,
    num_attempts=1,
    prompt_tokens=100,
    output_tokens=7,
    ttft_s=1.0,
    predicted_ttft_s=1.2,
    handover_s=0.02,
    cached_tokens=4,
    predicted_cached_tokens=0,
)


@pytest.mark.parametrize(
    ("change", "is_judged"),
    [
        ({}, True),
        ({"cached_tokens": 6}, False),  # more of it was cached than was thought
        ({"predicted_cached_tokens": 10}, False),
        ({"num_attempts": 2}, False),
        ({"ttft_s": None}, False),
        ({"predicted_ttft_s": None}, False),
    ],
)
def test_an_answer_judges_what_was_promised(change: dict[str, Any], is_judged: bool) -> None:
    """And nothing that another attempt, or a surprise in a cache, has made of it."""
    table = PeerTable()
    table.join(a_worker(Role.PREFILL, 1))
    router = Router(POLICIES["least_loaded"](), table, index_bytes=1 << 20)
    for _ in range(LEAST_ANSWERS):
        assert router.learn(CAME._replace(**change), 1.0) is None
    error = router.expectations.error_p50(W, 1.0)
    assert error == (pytest.approx(0.2) if is_judged else None)
