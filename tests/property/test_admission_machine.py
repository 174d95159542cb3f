"""Admission under any order of requests, reports, losses and time: nobody overtakes its equals,
nobody waits while a worker has room, all bounds hold, and everybody hears something in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.core.admission.admission import Admission, Admit, Effect, TurnAway
from services.gateway.core.admission.overload import ChosenPair, Overload, OverloadMode
from services.gateway.core.admission.tenants import Tenants, Terms
from services.gateway.core.admission.work_ahead import ANSWERS_AHEAD, PROMPTS_AHEAD
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.tenants import Tenant
from tests.support.routing import a_worker

MAX_RUNNING, MAX_WAITING, MAX_WAIT_S, PENDING = 7, 3, 2.0, 1000
OF_CAPPED = 2
NOBODY = Sides([], [], [])


@dataclass(eq=False)
class Asked:
    """What is known of a request from outside."""

    number: int
    terms: Terms
    num_tokens: int
    came_at: float
    deadline_at: float
    limit_at: float
    follows: bytes
    state: str = "new"
    num_cached: int = 0
    has_begun: bool = False
    has_room: bool = False
    pair: ChosenPair | None = None

    @property
    def key(self) -> bytes:
        return b"%d" % self.number

    def goes_before(self, other: Asked) -> bool:
        """Whether it may not be let in after this one: neither more urgent nor earlier."""
        return (
            self.terms.tenant == other.terms.tenant
            and self.terms.priority >= other.terms.priority
            and self.number < other.number
            and self.came_at + self.terms.ttft_s <= other.came_at + other.terms.ttft_s
        )


class AdmissionMachine(RuleBasedStateMachine):
    """The gateway's shell, its clients and its workers, played by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asked: list[Asked] = []
        self.nobody_since: float | None = None
        self.numbers = count(1)
        self.prefills = [a_worker(Role.PREFILL, next(self.numbers))]
        self.decodes = [a_worker(Role.DECODE, next(self.numbers))]
        self.is_silent = False
        self.sides = NOBODY
        self.overload = Overload(OverloadMode.EARLY)
        self.admission = Admission(
            max_running=MAX_RUNNING,
            max_waiting=MAX_WAITING,
            max_wait_s=MAX_WAIT_S,
            overload=self.overload,
            sides=lambda: self.sides,
            tenants=Tenants({"capped": Tenant(max_running=OF_CAPPED)}),
            max_pending_tokens=PENDING,
        )
        self.mesh_changed()

    # --- what is known from outside ---------------------------------------------------------------

    def those(self, *states: str) -> list[Asked]:
        return [it for it in self.asked if it.state in states]

    @property
    def running(self) -> list[Asked]:
        return self.those("admitted", "sent")

    def may_run(self, tenant: str) -> bool:
        return tenant != "capped" or self.num_of("capped") < OF_CAPPED

    def num_of(self, tenant: str) -> int:
        return sum(it.terms.tenant == tenant for it in self.running)

    @property
    def sums(self) -> list[int]:
        """What ``WorkAhead`` adds up, in the order of ``SUMS``: nothing of workers that cannot be
        asked."""
        prefills, decodes = [*self.sides.prefills, None], [*self.sides.decodes, None]
        prompts = [
            it for it in self.running
            if not it.has_begun and (it.pair and it.pair.prefill) in prefills
        ]  # fmt: skip
        ahead = [it for it in self.running if (it.pair and it.pair.decode) in decodes]
        roomless = [it.num_tokens for it in ahead if not it.has_room]
        to_compute = sum(max(0, it.num_tokens - it.num_cached) for it in prompts)
        num_answers = sum(it.has_begun for it in ahead)
        return [len(prompts), to_compute, num_answers, len(roomless), sum(roomless)]

    @property
    def is_enough(self) -> bool:
        """The rule of ``WorkAhead``, counted anew; how far it has come step by step is its own."""
        if not self.sides:
            return True
        num_prompts, to_compute, num_answers, num_roomless, roomless_tokens = self.sums
        prefills, decodes = self.sides.prefills, self.sides.decodes
        share = sum(1 / max(1, it.status.num_gateways) for it in prefills)
        most = PENDING * share
        if any(it.status.num_gateways > 1 for it in prefills):
            left = PENDING * len(prefills) - sum(it.others_tokens for it in prefills)
            most = max(most, min(left, self.admission._work_ahead._most_yet))
        if num_prompts >= PROMPTS_AHEAD * share - 1e-9 and to_compute >= most - 1e-9:
            return True
        num_places = [it.status.max_running for it in decodes]
        own = sum(it.status.max_running / max(1, it.status.num_gateways) for it in decodes)
        others = sum(it.others_answers for it in decodes)
        if all(num_places) and num_answers >= max(own - 1e-9, sum(num_places) - others):
            return True
        share = sum(1 / max(1, it.status.num_gateways) for it in decodes)
        if num_roomless < ANSWERS_AHEAD * share - 1e-9:
            return False
        needed = roomless_tokens // num_roomless
        return all(it.reserved_blocks + it.blocks_for(needed) > it.num_blocks for it in decodes)

    @property
    def is_full(self) -> bool:
        return len(self.running) >= MAX_RUNNING or self.is_enough

    # --- effects ----------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            (one,) = (it for it in self.asked if it.key == effect.key)
            match effect:
                case Admit():
                    assert one.state in ("new", "waits")
                    assert self.may_run(one.terms.tenant)
                    assert len(self.running) < MAX_RUNNING
                    assert not self.is_enough
                    if not one.follows:
                        before = [it for it in self.those("waits") if not it.follows]
                        assert not any(it.goes_before(one) for it in before)
                    one.state = "admitted"
                case TurnAway():
                    # Who is about to be sent, too, if it is late already.
                    is_late = one.state == "sent" and self.now > one.limit_at
                    assert one.state in ("new", "waits") or is_late
                    one.state = "refused"
                    self.perform(self.admission.leave(one.key, self.now))

    def mesh_changed(self) -> None:
        self.sides = NOBODY
        if not self.is_silent and self.prefills and self.decodes:
            for place, worker in enumerate((*self.prefills, *self.decodes)):
                worker.bit = 1 << place
            everybody = sum(it.bit for it in self.decodes)
            self.sides = Sides(self.prefills[:], [everybody] * len(self.prefills), self.decodes[:])
        if self.sides:
            self.nobody_since = None
        elif self.nobody_since is None:
            self.nobody_since = self.now
        self.perform(self.admission.changed(self.now))

    # --- events -----------------------------------------------------------------------------------

    @rule(
        num=st.integers(1, 6),
        tenant=st.sampled_from(["", "", "other", "capped"]),
        priority=st.sampled_from([3, 3, 3, 5]),
        num_tokens=st.sampled_from([10, 300, 600]),
        ttft_s=st.sampled_from([math.inf, math.inf, 1.5, 30.0]),
        deadline_s=st.sampled_from([math.inf, math.inf, 0.5, 9.0]),
    )
    def ask(
        self,
        num: int,
        tenant: str,
        priority: int,
        num_tokens: int,
        ttft_s: float,
        deadline_s: float,
    ) -> None:
        """Some requests come, each a little after all that was before."""
        for _ in range(num):
            self.wait(0.001)
            self.arrive(Terms(tenant, priority, ttft_s), num_tokens, self.now + deadline_s, b"")

    @precondition(lambda self: any(not it.follows for it in self.running))
    @rule(data=st.data(), num=st.integers(1, 3))
    def ask_for_more(self, data: st.DataObject, num: int) -> None:
        """A request that is in has further answers."""
        first = data.draw(st.sampled_from([it for it in self.running if not it.follows]))
        for _ in range(num):
            self.arrive(first.terms, first.num_tokens, first.deadline_at, first.key)

    def arrive(self, terms: Terms, num_tokens: int, deadline_at: float, follows: bytes) -> None:
        limit_at = math.inf if follows else self.now + terms.ttft_s
        one = Asked(len(self.asked), terms, num_tokens, self.now, deadline_at, limit_at, follows)
        num_before = sum(not it.follows for it in self.those("waits"))
        self.asked.append(one)
        effects = self.admission.arrive(
            one.key,
            self.now,
            terms=terms,
            num_tokens=num_tokens,
            deadline_at=deadline_at,
            follows=follows,
        )
        if Admit(one.key) not in effects:
            one.state = "waits"
        self.perform(effects)
        most = MAX_WAITING + (MAX_RUNNING - len(self.running) if self.is_enough else 0)
        assert sum(not it.follows for it in self.those("waits")) <= max(most, num_before)

    @precondition(lambda self: self.those("admitted") and self.sides)
    @rule(data=st.data(), is_cached=st.booleans(), is_apart=st.booleans())
    def send(self, data: st.DataObject, is_cached: bool, is_apart: bool) -> None:
        """One that was let in goes to a pair, or to a worker that does it all; perhaps anew."""
        one = data.draw(st.sampled_from(self.running))
        prefill = data.draw(st.sampled_from(self.prefills))
        decode = data.draw(st.sampled_from(self.decodes)) if is_apart else prefill
        one.state, one.has_room = "sent", not is_apart
        one.num_cached = one.num_tokens - 1 if is_cached else 0
        one.pair = ChosenPair(prefill, decode, one.num_cached)
        self.perform(self.admission.pair_found(one.key, one.pair, self.now))

    @precondition(lambda self: self.those("admitted") and self.sides)
    @rule(num=st.integers(1, 4))
    def serve(self, num: int) -> None:
        """The first ones that were let in have their first tokens."""
        for one in self.those("admitted")[:num]:
            one.state = "sent"
            one.pair = ChosenPair(self.prefills[0], self.decodes[0])
            self.perform(self.admission.pair_found(one.key, one.pair, self.now))
            if one.state == "refused":
                continue
            one.has_room = True
            self.perform(self.admission.granted(one.key, self.now))
            one.has_begun = True
            self.perform(self.admission.emitted(one.key, 1, self.now, cached_tokens=0))

    @precondition(lambda self: self.those("sent"))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        """Decode has room for one."""
        one = data.draw(st.sampled_from(self.those("sent")))
        one.has_room = True
        self.perform(self.admission.granted(one.key, self.now))

    @precondition(lambda self: self.those("sent"))
    @rule(data=st.data())
    def give_token(self, data: st.DataObject) -> None:
        """A token of one is handed on."""
        one = data.draw(st.sampled_from(self.those("sent")))
        self.perform(self.admission.prompt_computed(one.key, self.now))
        one.has_begun = True
        self.perform(self.admission.emitted(one.key, 1, self.now, cached_tokens=one.num_cached))

    @precondition(lambda self: self.those("waits", "admitted", "sent"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """One is over, or its client goes."""
        one = data.draw(st.sampled_from(self.those("waits", "admitted", "sent")))
        one.state = "over"
        self.perform(self.admission.leave(one.key, self.now))

    @rule(seconds=st.sampled_from([0.1, 0.7, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; the timer is kept."""
        until = self.now + seconds
        while (at := self.admission.next_tick_at) is not None and at <= until:
            self.now = max(self.now, at)
            self.perform(self.admission.tick(self.now))
        self.now = until

    # --- the workers ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.prefills) + len(self.decodes) < 6)
    @rule(role=st.sampled_from([Role.PREFILL, Role.DECODE]))
    def join(self, role: Role) -> None:
        """One more."""
        workers = self.prefills if role is Role.PREFILL else self.decodes
        workers.append(a_worker(role, next(self.numbers)))
        self.mesh_changed()

    @precondition(lambda self: self.prefills + self.decodes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """One less."""
        gone = data.draw(st.sampled_from(self.prefills + self.decodes))
        for workers in (self.prefills, self.decodes):
            if gone in workers:
                workers.remove(gone)
        self.mesh_changed()

    @rule()
    def fall_silent(self) -> None:
        """All of them at once, or they speak again."""
        self.is_silent = not self.is_silent
        self.mesh_changed()

    @precondition(lambda self: self.decodes)
    @rule(
        data=st.data(),
        num_places=st.sampled_from([1, 4, 9]),
        num_gateways=st.sampled_from([1, 3]),
        reserved=st.sampled_from([0, 60, 64]),
        num_answers=st.sampled_from([0, 1, 9]),
    )
    def decode_reports(
        self,
        data: st.DataObject,
        num_places: int,
        num_gateways: int,
        reserved: int,
        num_answers: int,
    ) -> None:
        """A decode worker tells what it has."""
        worker: Worker = data.draw(st.sampled_from(self.decodes))
        status = WorkerStatus(
            max_running=worker.status.max_running or num_places,  # that never changes
            num_gateways=num_gateways,
            reserved_blocks=reserved,
            num_answers=num_answers,
        )
        self.report(worker, status)

    @precondition(lambda self: self.prefills)
    @rule(
        data=st.data(),
        num_gateways=st.sampled_from([1, 3]),
        pending=st.sampled_from([0, 300, 900, 2000]),
    )
    def prefill_reports(self, data: st.DataObject, num_gateways: int, pending: int) -> None:
        """A prefill worker tells what it has."""
        worker: Worker = data.draw(st.sampled_from(self.prefills))
        self.report(worker, WorkerStatus(num_gateways=num_gateways, pending_tokens=pending))

    def report(self, worker: Worker, status: WorkerStatus) -> None:
        worker.report(status, self.now)
        self.perform(self.admission.changed(self.now, worker))

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        assert self.admission._work_ahead.is_enough == self.is_enough
        kept = vars(self.admission._work_ahead)
        assert [kept[name] for name in SUMS] == self.sums
        if not self.is_full:
            assert not any(self.may_run(it.terms.tenant) for it in self.those("waits"))

    @invariant()
    def everybody_hears_in_time(self) -> None:
        since = math.inf if self.nobody_since is None else self.nobody_since
        for one in self.those("waits"):
            assert self.now < one.deadline_at
            assert self.now < one.limit_at
            assert self.now < max(since, one.came_at) + MAX_WAIT_S

    @invariant()
    def bounds_hold(self) -> None:
        counts, of_tenants = (
            self.admission.statistics(),
            Counter(it.terms.tenant for it in self.running),
        )
        assert counts.num_running == len(self.running) <= MAX_RUNNING
        assert counts.num_waiting == len(self.those("waits"))
        assert counts.num_refused == len(self.those("refused"))
        assert of_tenants["capped"] <= OF_CAPPED
        assert sum(not it.follows for it in self.those("waits")) <= MAX_WAITING + MAX_RUNNING

    def teardown(self) -> None:
        """When all are over, nothing of them is left."""
        while left := self.those("waits", "admitted", "sent"):
            left[0].state = "over"
            self.perform(self.admission.leave(left[0].key, self.now))
        self.bounds_hold()
        held = self.admission
        assert held.next_tick_at is None
        kept = held._running, held._waiting, held._behind, held._give_up, self.overload._answers
        assert not any(kept), kept
        assert len(held._queue) == 0
        assert not +held._num_of_tenant
        assert self.sums == [0] * len(SUMS)
        self.nobody_waits_while_there_is_room()


SUMS = ("_num_prompts", "_num_to_compute", "_num_answers", "_num_roomless", "_roomless_tokens")

TestAdmissionMachine = AdmissionMachine.TestCase
