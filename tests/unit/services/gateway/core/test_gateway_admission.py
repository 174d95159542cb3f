"""Admission: bounded, first come first served, refused at once when full."""

from __future__ import annotations

import pytest

from services.gateway.core.admission import Admission, Admitted
from shared.errors import DeadlinePassed, Overloaded


def an_admission(running: int = 1, waiting: int = 2) -> Admission:
    return Admission(max_running=running, max_waiting=waiting, max_wait_s=2.0)


def test_waiting_requests_run_in_order_of_arrival() -> None:
    """Each departure lets in the oldest."""
    admission = an_admission()
    assert admission.arrive(b"a", 0.0, None) is Admitted.NOW
    assert admission.arrive(b"b", 0.0, None) is Admitted.QUEUED
    assert admission.arrive(b"c", 0.0, None) is Admitted.QUEUED
    assert admission.leave(b"a") == [b"b"]
    assert admission.leave(b"b") == [b"c"]


def test_a_full_waiting_room_refuses_at_once_with_a_hint() -> None:
    """Overloaded, with Retry-After."""
    admission = an_admission(waiting=0)
    admission.arrive(b"a", 0.0, None)
    with pytest.raises(Overloaded) as refused:
        admission.arrive(b"b", 0.0, None)
    assert refused.value.retry_after_s > 0
    assert admission.statistics().num_refused == 1


def test_a_waiting_request_gives_up_at_the_earlier_of_limit_and_deadline() -> None:
    """The error says which of the two it was."""
    admission = an_admission()
    admission.arrive(b"a", 0.0, None)
    admission.arrive(b"b", 1.0, None)
    admission.arrive(b"c", 1.0, 1.5)
    assert admission.give_up_at(b"b") == 3.0
    assert admission.give_up_at(b"c") == 1.5
    assert isinstance(admission.expire(b"c", 1.5), DeadlinePassed)
    assert isinstance(admission.expire(b"b", 3.0), Overloaded)
    assert admission.expire(b"b", 3.0) is None


def test_a_cancelled_waiter_leaves_no_trace() -> None:
    """Its place goes to the next."""
    admission = an_admission()
    admission.arrive(b"a", 0.0, None)
    admission.arrive(b"b", 0.0, None)
    admission.arrive(b"c", 0.0, None)
    assert admission.leave(b"b") == []
    assert admission.leave(b"a") == [b"c"]


def test_a_passed_deadline_is_refused_at_the_door() -> None:
    """No queueing for what cannot be met."""
    with pytest.raises(DeadlinePassed):
        an_admission().arrive(b"a", 5.0, 5.0)
