"""Admission: bounded, in the queue's order, refused at once when full; effects say all of it."""

from __future__ import annotations

import sys

import pytest

from services.gateway.core.admission.admission import Admission, Admit, Effect, TurnAway
from services.gateway.core.admission.overload import ChosenPair, Overload, OverloadMode
from services.gateway.core.admission.tenants import Tenants, Terms
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Role
from shared.errors import DeadlinePassed, InvalidRequest, Overloaded, ShuttingDown
from shared.tenants import Asked, Tenant
from tests.support.routing import a_worker

PAIR = Sides([a_worker(Role.PREFILL, 1)], [1], [a_worker(Role.DECODE, 2, bit=1)])


def an_admission(running: int = 1, waiting: int = 2, **tenants: Tenant) -> Admission:
    """One place, room for two, two seconds."""
    return Admission(
        max_running=running,
        max_waiting=waiting,
        max_wait_s=2.0,
        overload=Overload(OverloadMode.OFF),
        sides=lambda: PAIR,
        tenants=Tenants(tenants),
    )


def of(tenant: str, priority: int = 3) -> Terms:
    return Terms(tenant=tenant, priority=priority)


def refused(effects: list[Effect]) -> tuple[bytes, str]:
    """Return who was refused, and why; nothing else may have happened."""
    (effect,) = effects
    assert isinstance(effect, TurnAway)
    return effect.key, effect.error.code


def test_a_request_runs_at_once_waits_or_follows() -> None:
    """Places first, then the queue, in order of arrival."""
    admission = an_admission()
    assert admission.arrive(b"a", 0.0) == [Admit(b"a")]
    assert admission.arrive(b"b", 0.0) == []
    assert admission.arrive(b"c", 0.0) == []
    assert admission.leave(b"a", 0.1) == [Admit(b"b")]
    assert admission.leave(b"b", 0.2) == [Admit(b"c")]
    assert admission.leave(b"c", 0.3) == []


def test_a_full_waiting_room_refuses_with_a_hint() -> None:
    """At once, without looking at the rest."""
    admission = an_admission(waiting=0)
    admission.arrive(b"a", 0.0)
    (refusal,) = admission.arrive(b"b", 0.0)
    assert isinstance(refusal, TurnAway)
    assert isinstance(refusal.error, Overloaded)
    assert (refusal.error.code, refusal.error.retry_after_s) == ("queue_full", 2.0)
    assert admission.statistics().refusals == {"queue_full": 1}
    assert admission.statistics().num_refused == 1


def test_who_has_left_is_forgotten_whoever_waits_before_them() -> None:
    """Not when their time in the queue, or until they age, would have been over."""
    admission = an_admission()
    admission.arrive(b"a", 0.0)
    admission.arrive(b"b", 0.0)
    keys = [number.to_bytes(4, "big") for number in range(1000)]
    for key in keys:
        assert admission.arrive(key, 0.1) == []
        assert admission.leave(key, 0.1) == []
        assert admission.next_tick_at == 2.0
    # Three who know each are this test.
    assert sum(sys.getrefcount(key) > 3 for key in keys) < 50
    assert admission.leave(b"a", 0.1) == [Admit(b"b")]


def test_who_waits_too_long_is_refused_at_its_time() -> None:
    """By the limit of the queue, or by its own deadline if that comes first."""
    admission = an_admission()
    assert admission.next_tick_at is None
    admission.arrive(b"a", 0.0)
    admission.arrive(b"b", 1.0)
    admission.arrive(b"c", 1.0, deadline_at=1.5)
    assert admission.next_tick_at == 1.5
    assert admission.tick(1.4) == []
    (late,) = admission.tick(1.5)
    assert isinstance(late, TurnAway)
    assert (late.key, type(late.error)) == (b"c", DeadlinePassed)
    assert admission.next_tick_at == 3.0
    assert refused(admission.tick(3.0)) == (b"b", "queue_timeout")
    assert admission.next_tick_at is None
    assert admission.statistics().refusals == {"deadline": 1, "queue_timeout": 1}


def test_who_waits_when_early_refusal_begins_or_ends_is_refused_by_the_limit_it_came_with() -> None:
    """The live planner changes the mode while requests wait."""
    overload = Overload(OverloadMode.OFF)
    admission = Admission(
        max_running=1,
        max_waiting=2,
        max_wait_s=2.0,
        overload=overload,
        sides=lambda: PAIR,
    )
    admission.arrive(b"a", 0.0)
    admission.arrive(b"b", 0.0, terms=Terms(ttft_s=60.0))
    overload.mode = OverloadMode.EARLY
    assert refused(admission.tick(2.0)) == (b"b", "queue_timeout")
    admission.arrive(b"c", 3.0, terms=Terms(ttft_s=1.0))
    overload.mode = OverloadMode.OFF
    assert refused(admission.tick(4.0)) == (b"c", "slo_ttft")


def test_who_leaves_the_queue_frees_no_place() -> None:
    """A place is freed by who ran; who left is not admitted."""
    admission = an_admission()
    for key in (b"a", b"b", b"c"):
        admission.arrive(key, 0.0)
    assert admission.leave(b"b", 0.1) == []
    assert admission.leave(b"a", 0.2) == [Admit(b"c")]
    assert admission.leave(b"unknown", 0.3) == []


def test_a_deadline_that_has_passed_is_refused_at_once() -> None:
    """Whatever place there is."""
    (refusal,) = an_admission().arrive(b"a", 5.0, deadline_at=5.0)
    assert isinstance(refusal, TurnAway)
    assert isinstance(refusal.error, DeadlinePassed)


def test_a_higher_priority_goes_first_and_takes_the_place_of_a_lower_one() -> None:
    """In the queue, and of a full queue; equal ones do not."""
    admission = an_admission(waiting=1)
    admission.arrive(b"a", 0.0)
    admission.arrive(b"low", 0.0, terms=of("t", 2))
    assert refused(admission.arrive(b"equal", 0.0, terms=of("t", 2))) == (b"equal", "queue_full")
    assert refused(admission.arrive(b"high", 0.0, terms=of("t", 5))) == (b"low", "queue_full")
    assert admission.leave(b"a", 0.1) == [Admit(b"high")]


def test_a_tenant_that_fills_the_queue_makes_room_for_another() -> None:
    """Who has the most waiting for its weight loses its last one."""
    admission = an_admission(waiting=4)
    admission.arrive(b"run", 0.0, terms=of("big"))
    for key in (b"1", b"2", b"3", b"4"):
        admission.arrive(key, 0.0, terms=of("big"))
    assert refused(admission.arrive(b"small", 0.0, terms=of("small"))) == (b"4", "queue_full")
    # It owes nothing for the time when it was away, and has nothing saved up.
    assert admission.leave(b"run", 0.1) == [Admit(b"1")]
    admission.emitted(b"1", 1, 0.2, cached_tokens=0)
    assert admission.leave(b"1", 0.3) == [Admit(b"small")]


def test_a_tenant_at_its_own_limit_waits_and_holds_up_nobody() -> None:
    """Its requests wait for one of its own to end."""
    admission = an_admission(running=3, capped=Tenant(max_running=1))
    assert admission.arrive(b"1", 0.0, terms=of("capped", 7)) == [Admit(b"1")]
    assert admission.arrive(b"2", 0.0, terms=of("capped", 7)) == []
    assert admission.arrive(b"3", 0.0, terms=of("other")) == [Admit(b"3")]
    assert admission.leave(b"3", 0.1) == []
    assert admission.leave(b"1", 0.2) == [Admit(b"2")]


def test_who_waits_for_its_own_tenant_is_told_so() -> None:
    """A refusal names the limit, which is not the gateway's."""
    admission = an_admission(running=3, waiting=1, capped=Tenant(max_running=1))
    for key in (b"1", b"2"):
        admission.arrive(key, 0.0, terms=of("capped"))
    (full,) = admission.arrive(b"3", 0.0, terms=of("capped"))
    (late,) = admission.tick(2.0)
    for refusal in (full, late):
        assert isinstance(refusal, TurnAway)
        assert "of this API key 1 run, as many as may (max_running)" in refusal.error.message


def test_further_answers_of_a_request_wait_until_its_deadline() -> None:
    """However many wait already, and however long: the first one let the request in."""
    admission = an_admission(waiting=0, t=Tenant(max_running=1))
    assert admission.arrive(b"1", 0.0, terms=of("t"), deadline_at=60.0) == [Admit(b"1")]
    for key in (b"2", b"3"):
        assert admission.arrive(key, 0.0, terms=of("t"), deadline_at=60.0, follows=b"1") == []
    assert admission.statistics().num_waiting == 2
    assert refused(admission.arrive(b"new", 1.0, terms=of("t", 7))) == (b"new", "queue_full")
    assert admission.leave(b"1", 50.0) == [Admit(b"2")]
    assert admission.tick(59.9) == []
    (late,) = admission.tick(60.0)
    assert late.key == b"3"
    assert isinstance(late.error, DeadlinePassed)
    admission.leave(b"3", 60.0)
    assert admission.leave(b"2", 60.0) == []
    assert admission.arrive(b"4", 61.0, terms=of("t"), follows=b"1") == [Admit(b"4")]
    assert admission.arrive(b"5", 61.0, terms=of("t"), follows=b"1") == []
    assert admission.tick(1e6) == []


def test_further_answers_take_turns_with_other_requests() -> None:
    """One request with many of them is as one that waits, not as many; those that leave before
    their turn are passed over."""
    admission = an_admission(waiting=9)
    admission.arrive(b"1", 0.0)
    for key in (b"2", b"3", b"4", b"5"):
        admission.arrive(key, 0.0, follows=b"1")
    for key in (b"x", b"y"):
        admission.arrive(key, 0.1)
    assert admission.leave(b"3", 0.2) == []
    order, now = [b"1"], 0.2
    while admission.statistics().num_waiting:
        now += 0.1
        (effect,) = admission.leave(order[-1], now)
        order.append(effect.key)
    assert order == [b"1", b"2", b"x", b"y", b"4", b"5"]


def test_between_its_turns_a_request_leaves_its_tenant_what_it_is_behind() -> None:
    """Its tenant has waited all the time, although one answer at a time stands in the queue."""
    admission = an_admission(waiting=9)
    for key in (b"big", b"more", b"most"):
        admission.arrive(key, 0.0, terms=of("big"), num_tokens=10)
    admission.arrive(b"1", 0.0, terms=of("small"), num_tokens=10)
    admission.emitted(b"big", 500, 0.1, cached_tokens=0)
    assert admission.leave(b"big", 0.1) == [Admit(b"1")]
    for key in (b"2", b"3", b"4"):
        admission.arrive(key, 0.1, terms=of("small"), num_tokens=10, follows=b"1")
    admission.emitted(b"1", 50, 0.2, cached_tokens=0)
    assert admission.leave(b"1", 0.2) == [Admit(b"more")]
    admission.emitted(b"more", 500, 0.3, cached_tokens=0)
    for ended, admitted in ((b"more", b"2"), (b"2", b"3"), (b"3", b"4"), (b"4", b"most")):
        assert admission.leave(ended, 0.4) == [Admit(admitted)]
        admission.emitted(admitted, 5, 0.4, cached_tokens=0)


def test_what_was_never_sent_to_workers_was_not_given() -> None:
    """While there is no pair, who tries on is not behind afterwards."""
    admission = an_admission()
    for number in range(9):
        assert admission.arrive(b"%d" % number, 0.0, terms=of("tries"), num_tokens=1000)
        admission.leave(b"%d" % number, 0.0)
    assert admission._queue.counter("tries", 3) == 0.0


def test_a_prompt_that_was_sent_to_prefill_alone_was_given_though_its_client_leaves() -> None:
    """Who asks for one token and hangs up before it comes has had the work all the same."""
    admission, worker = an_admission(), a_worker(Role.PREFILL, 1)
    admission.arrive(b"1", 0.0, terms=of("hasty"), num_tokens=1000)
    admission.pair_found(b"1", ChosenPair(worker, None), 0.0)
    admission.leave(b"1", 0.1)
    assert admission._queue.counter("hasty", 3) == 1000.0


def test_a_gateway_that_shuts_down_refuses_who_waits() -> None:
    """Who runs goes on."""
    admission = an_admission()
    for key in (b"a", b"b", b"c"):
        admission.arrive(key, 0.0)
    effects = admission.close(ShuttingDown("over"))
    assert [effect.key for effect in effects] == [b"b", b"c"]
    assert admission.statistics().num_running == 1
    assert admission.statistics().num_waiting == 0


def test_a_request_has_its_own_limits_before_its_tenants() -> None:
    """And never a priority above what the tenant may ask for."""
    tenants = Tenants({"t": Tenant(ttft_ms=500, tpot_ms=50, max_priority=4)})
    assert tenants.terms(Asked("t", None, None, 80.0)) == Terms("t", 3, 0.5, 0.08)
    assert tenants.terms(Asked("t", 4)).priority == 4
    with pytest.raises(InvalidRequest, match="may ask for 0 to 4, not for 5") as caught:
        tenants.terms(Asked("t", 5))
    assert (caught.value.param, caught.value.code) == ("priority", "priority_too_high")
    assert tenants.terms(Asked("stranger", 7)) == Terms("stranger", 7)
    assert Tenants({"low": Tenant(max_priority=1)}).terms(Asked("low")).priority == 1
