"""The fair queue: priority, tenants by what they were given, deadlines; and nobody starves."""

from __future__ import annotations

import math
import random
from collections.abc import Container

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.admission.fair_queue import (
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    FairQueue,
    QueuedRequest,
)
from services.gateway.core.admission.tenants import Terms


def a_queue(ageing_s: float = math.inf, capped: Container[str] = (), **weights: float) -> FairQueue:
    """capped: tenants that may run none."""
    weight_of = lambda name: weights.get(name, 1.0)  # noqa: E731
    return FairQueue(weight_of, lambda name: name not in capped, ageing_s=ageing_s)


def put(
    queue: FairQueue,
    key: str,
    tenant: str = "t",
    priority: int = 3,
    since: float = 0.0,
    due_at: float = math.inf,
) -> QueuedRequest:
    request = QueuedRequest(key.encode(), Terms(tenant, priority), since, due_at)
    queue.push(request)
    return request


def drain(queue: FairQueue, now: float = 0.0) -> str:
    """Take out all, as one word."""
    taken = ""
    while (request := queue.pop(now)) is not None:
        taken += request.key.decode()
    return taken


def test_priority_then_deadline_then_arrival() -> None:
    """Within one tenant."""
    queue = a_queue()
    put(queue, "d")
    put(queue, "e")
    put(queue, "c", due_at=9.0)
    put(queue, "b", due_at=5.0)
    put(queue, "a", priority=4)
    put(queue, "f", priority=0, due_at=1.0)
    assert drain(queue) == "abcdef"
    assert len(queue) == 0


def test_who_waits_rises() -> None:
    """One priority after each span of ageing, so that a low one is before a newer high one."""
    queue = a_queue(ageing_s=1.0)
    put(queue, "l", priority=0)
    put(queue, "h", priority=5, since=5.5)
    assert queue.num_ahead(Terms("t", 5), 4.9) == 1
    request = queue.pop(4.9)
    assert request is not None
    assert request.key == b"h"
    put(queue, "h", priority=5, since=5.5)
    # Nobody has been served since it rose.
    assert queue.num_ahead(Terms("t", 5), 5.6) == 2
    assert drain(queue, 5.6) == "lh"


def test_lines_that_nobody_is_served_from_are_forgotten() -> None:
    """Who gives up behind a priority that always waits leaves nothing, however many they are."""
    queue = a_queue(ageing_s=1.0)
    waiting: list[QueuedRequest] = []
    for now in range(1000):
        put(queue, "h", priority=7, since=now)
        put(queue, "h", priority=7, since=now)
        waiting.append(put(queue, "l", tenant="low", priority=0, since=now))
        queue.pop(now)
        if now >= 4:
            queue.remove(waiting.pop(0))
    kept = [
        len(line)
        for equals in queue._equals
        for name, line in equals.lines.items()
        if name == "low"
    ]
    assert sum(kept) < 20


def test_the_tenant_with_the_least_work_is_next_by_weight() -> None:
    """Three times the weight, three times the work."""
    queue = a_queue(big=3.0)
    for number in range(40):
        put(queue, "b", "big", since=number)
        put(queue, "s", "small", since=number)
    taken = ""
    for _ in range(40):
        request = queue.pop(0.0)
        assert request is not None
        queue.charge(request.terms.tenant, 3, prompt_tokens=100)
        taken += request.key.decode()
    assert (taken.count("b"), taken.count("s")) == (30, 10)


def test_how_many_come_before() -> None:
    """However many another tenant has waiting: of it only its turns, as many more as its weight."""
    capped = set[str]()
    queue = a_queue(big=3.0, capped=capped)
    for number in range(40):
        put(queue, "b", "big", since=number)
        put(queue, "s", "small", since=number)
    put(queue, "h", "big", priority=4)
    newcomer = Terms("new", 3)
    assert queue.num_ahead(newcomer, 0.0) == 1 + 1 + 1
    capped.add("big")
    assert queue.num_ahead(newcomer, 0.0) == 1
    capped.clear()
    put(queue, "n", "new", since=50)
    assert queue.num_ahead(newcomer, 0.0) == 1 + 4 + 2 + 1
    assert queue.num_ahead(Terms("new", 4), 0.0) == 1
    put(queue, "N", "new", since=51)
    taken = ""
    while "N" not in taken:
        request = queue.pop(0.0)
        assert request is not None
        queue.charge(request.terms.tenant, 3, prompt_tokens=100)
        taken += request.key.decode()
    assert len(taken) - 1 == pytest.approx(8, abs=2)


def test_who_comes_back_has_saved_nothing_up() -> None:
    """It is lifted to the least of those that wait, or to who left last."""
    queue = a_queue()
    for _ in range(3):
        put(queue, "a", "a")
    queue.charge("a", 3, prompt_tokens=1000)
    put(queue, "b", "b")
    assert queue.counter("b", 3) == 1000
    drain(queue)
    queue.charge("b", 3, output_tokens=500)
    put(queue, "c", "c")
    assert queue.counter("c", 3) == queue.counter("b", 3)  # who left last


def test_who_hardly_gets_a_turn_is_no_measure_for_who_comes_back() -> None:
    """One of a lower priority has had nothing: lifted to that, a tenant that was away would be
    served before one that was here, until it has had as much. Nor is what it gets at another
    priority held against anybody here."""
    queue = a_queue()
    put(queue, "l", "low", priority=0)
    for _ in range(4):
        put(queue, "a", "always")
    for _ in range(3):
        assert queue.pop(0.0) is not None
        queue.charge("always", 3, prompt_tokens=1000)
    queue.charge("back", 7, prompt_tokens=5000)
    put(queue, "b", "back")
    assert queue.counter("back", 3) == 3000
    put(queue, "h", "low", priority=3)
    assert queue.counter("low", 3) == 3000
    assert drain(queue) == "abhl"


def test_what_is_taken_while_nobody_waits_is_held_against_nobody() -> None:
    """Else a tenant that used an idle mesh would stand still as soon as another one came."""
    queue = a_queue()
    for _ in range(50):
        for tenant in "ab":
            queue.pass_by(tenant, 3)
            queue.charge(tenant, 3, prompt_tokens=100 if tenant == "a" else 1)
    assert abs(queue.counter("a", 3) - queue.counter("b", 3)) <= 100


def test_a_tenant_that_may_not_run_is_passed_over() -> None:
    """Whatever its priority; it keeps its place."""
    capped = {"capped"}
    queue = a_queue(capped=capped)
    put(queue, "c", "capped", priority=7)
    put(queue, "o", "other", priority=0)
    assert drain(queue) == "o"
    capped.clear()
    assert drain(queue) == "c"


def test_who_waits_for_its_own_places_saves_nothing_up() -> None:
    """Neither for itself nor for who comes back meanwhile: both would be served before a tenant
    that was here all the time, until they have had as much."""
    capped = {"capped"}
    queue = a_queue(capped=capped)
    put(queue, "c", "capped")
    for _ in range(4):
        put(queue, "a", "always")
    for _ in range(3):
        assert queue.pop(0.0) is not None
        queue.charge("always", 3, prompt_tokens=1000)
    put(queue, "b", "back")
    assert queue.counter("back", 3) == 3000
    capped.clear()
    assert drain(queue) == "cab"
    assert queue.counter("capped", 3) == 3000


@given(st.data())
def test_requests_are_conserved_and_come_by_priority(data: st.DataObject) -> None:
    """Whatever comes and goes: each leaves once, none is invented, and none of a higher priority
    waits while a lower one is taken."""
    capped = set[str]()
    queue = a_queue(data.draw(st.sampled_from([1.0, 10.0, math.inf])), capped)
    inside: dict[bytes, QueuedRequest] = {}
    now = 0.0
    for number in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.3, 2.0]))
        match data.draw(st.sampled_from(["push", "push", "pop", "remove", "last"])):
            case "push":
                request = put(
                    queue,
                    str(number),
                    data.draw(st.sampled_from("abc")),
                    data.draw(st.integers(0, 7)),
                    now,
                    data.draw(st.sampled_from([math.inf, now + 1.0, now + 5.0])),
                )
                inside[request.key] = request
            case "pop":
                taken = queue.pop(now)
                assert (taken is None) == (not inside)
                if taken is not None:
                    assert inside.pop(taken.key) is taken
                    assert all(it.priority <= taken.priority for it in inside.values())
                    own = [it for it in inside.values() if it.terms.tenant == taken.terms.tenant]
                    peers = [it.due_at for it in own if it.priority == taken.priority]
                    assert all(taken.due_at <= due_at for due_at in peers)
            case "last":
                last = queue.last(now)
                assert (last is None) == (not inside)
                if last is not None:
                    assert last.priority == min(it.priority for it in inside.values())
            case _ if inside:
                removed = inside.pop(data.draw(st.sampled_from(sorted(inside))))
                queue.remove(removed)
                queue.remove(removed)  # twice is once
            case _:
                pass
        assert len(queue) == len(inside)
        lowest = Terms("alone", 0, ttft_s=1.0)
        capped.update("abc")
        assert queue.num_ahead(lowest, 0.0) == 0
        assert queue.num_ahead(lowest._replace(tenant="a"), 0.0) == sum(
            one.terms.tenant == "a" for one in inside.values()
        )
        capped.clear()


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    st.integers(1, 12),
)
def test_of_tenants_that_always_wait_none_gets_more_than_the_bound(
    seed: int, weights: list[float], places: int
) -> None:
    """VTC's theorem 4.4: at any two moments between which both wait, the weighted work of two
    tenants differs by at most 2 U, U = what runs at once."""
    chance = random.Random(seed)
    names = "abcd"[: len(weights)]
    share = dict(zip(names, weights, strict=True))
    queue = FairQueue(share.__getitem__, lambda _: True, ageing_s=math.inf)
    longest, most_out = 200, 60
    work = dict.fromkeys(names, 0.0)
    running: list[list[object]] = []
    marks: list[dict[str, float]] = [dict(work)]
    number = 0

    def refill() -> None:
        nonlocal number
        for name in names:
            while queue.share(name) * share[name] < 3:  # it always waits
                number += 1
                put(queue, str(number), name)

    for _ in range(300):
        refill()
        while len(running) < places:
            request = queue.pop(0.0)
            assert request is not None
            prompt, name = chance.randint(1, longest), request.terms.tenant
            queue.charge(name, 3, prompt_tokens=prompt)
            work[name] += PROMPT_WEIGHT * prompt / share[name]
            running.append([name, chance.randint(1, most_out)])
            refill()
        for one in running:  # a step: each answer gets a token
            name = str(one[0])
            one[1] = int(str(one[1])) - 1
            queue.charge(name, 3, output_tokens=1)
            work[name] += OUTPUT_WEIGHT / share[name]
        running = [one for one in running if int(str(one[1])) > 0]
        marks.append(dict(work))
    at_once = places * (PROMPT_WEIGHT * longest + OUTPUT_WEIGHT * most_out)
    bound = 2 * at_once / min(weights)
    for first in marks[::20]:
        for a in names:
            for b in names:
                gained = (work[a] - first[a]) - (work[b] - first[b])
                assert abs(gained) <= bound
