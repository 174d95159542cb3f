"""The workers of a simulated mesh as its gateway knows them: who joins, reports, pairs up, moves
and dies. What ``services/gateway/workers/membership.py`` performs, on an event heap."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.pools import (
    HomeOrder,
    Pool,
    change_home,
    home_of,
    is_confirmed,
    pool_of,
)
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES, PairWanted
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.sim.clock import EventClock
from services.sim.engine import TimedEngine
from services.sim.orders import Word, WorkerSize
from services.sim.reports import Reporter, status_of
from services.sim.worker import CoreWorker
from shared.errors import MeshError, WorkerLost
from shared.home import Home
from shared.ids import NO_ORDER, Incarnation, StreamId
from shared.kv.journal import KvChanges
from shared.kv.layout import KvLayout
from shared.kv.prefix_hash import UNIT
from shared.liveness import LivenessRule
from shared.model_spec import ModelSpec
from shared.transfer.messages import LinkId
from shared.worker_status import GATHER_S, REPORT_S, gather_s

INDEX_BYTES = 1 << 28

PAIR_S = 0.02
"""From the order to make a pair until both ends may use it."""


@dataclass
class Member:
    """A worker with what the gateway knows of it. home: its own word, told with each report.
    rule: of its heartbeats. silent_at: when it died."""

    core: CoreWorker
    worker: Worker
    home: Home
    joined_at: float
    rule: LivenessRule
    has_heard: StreamId = NO_ORDER
    silent_at: float = math.inf
    reporter: Reporter = field(init=False)

    def heard_at(self, now: float) -> float:
        """When the last of its heartbeats came: nobody needs an event for each."""
        lived_s = min(now, self.silent_at) - self.joined_at
        return self.joined_at + lived_s // self.rule.interval_s * self.rule.interval_s


class Members(ABC):
    """All workers. skips: see ``CoreWorker``.

    Whoever has requests says what is to be done with a worker's words and with its report, with
    those that wait for a pair, and with those of a worker that is lost.
    """

    liveness = LivenessRule()
    report_s, gather_s = REPORT_S, GATHER_S
    """How often workers report (``Reporter``); the more they are, the longer news are gathered."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        new_engine: Callable[[WorkerSize], TimedEngine],
        size: WorkerSize,
        *,
        policy: str,
        wire_s: float,
        skips: bool,
    ) -> None:
        self.clock = EventClock(wire_s)
        self.table = PeerTable()
        self.members: dict[Incarnation, Member] = {}
        self.policy = POLICIES[policy]()
        self.router = Router(self.policy, self.table, index_bytes=INDEX_BYTES)
        self._skips = skips
        self._orders: list[HomeOrder] = []
        self._spec, self._layout = spec, layout
        self._new_engine, self._size = new_engine, size
        self._links = itertools.count(1)
        self._order_numbers = itertools.count(1)

    @abstractmethod
    def _tell(self, core: CoreWorker, word: Word) -> None: ...

    @abstractmethod
    def _look_again(self) -> None: ...

    @abstractmethod
    def _reported(self, worker: Worker) -> None: ...

    @abstractmethod
    def _lost(self, member: Member, error: MeshError) -> None: ...

    def run(self, until: Callable[[], bool], limit_s: float = 60.0) -> None:
        self.clock.run(until, limit_s)

    def start(
        self,
        role: str,
        *,
        serves_both: bool = False,
        is_colocated: bool = False,
        engine: TimedEngine | None = None,
        size: WorkerSize | None = None,
    ) -> CoreWorker:
        """A new worker joins, and is paired with all that it may push to or take from. engine,
        size: None = as every worker's. is_colocated: it computes whole requests and is its own
        prefill worker; one that serves both roles does so, too, and moves."""
        size, is_mixed = size or self._size, is_colocated or serves_both
        core = CoreWorker(
            1 + len(self.members),
            self.clock,
            self._spec,
            self._layout,
            engine or self._new_engine(size),
            self._tell,
            size=size,
            pushes=role == "prefill" or serves_both,
            is_mixed=is_mixed,
            skips=self._skips,
        )
        if self.router.prefixes is not None or size.tiers:  # else nobody ever asks what is cached
            core.pool.listen(core.journal, UNIT)
        worker = Worker(
            role=Role(role),
            incarnation=core.incarnation,
            host="core",
            port=1,
            model=self._spec,
            layout=self._layout,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            serves=(Role.PREFILL, Role.DECODE) if serves_both else (),
        )
        member = Member(core, worker, home_of(worker), self.clock.now, self.liveness)
        member.reporter = Reporter(
            core,
            lambda: self.report_of(
                member, status_of(core, member.home, member.has_heard, is_mixed=is_mixed)
            ),
            lambda status, changes: self._read(member, status, changes),
            self.report_s,
            self.gather_s,
        )
        for other in [it for it in self.members.values() if it.core.is_alive]:
            if any(
                Role.PREFILL in source.worker.serves and Role.DECODE in sink.worker.serves
                for source, sink in ((member, other), (other, member))
            ):
                self._pair(member.core, other.core)
        self.members[core.incarnation] = member
        self.table.join(worker)
        worker.is_connected = True
        if self.router.prefixes is not None and self.router.prefixes.joined(worker):
            self._ask_prefixes()
        for it in self.members.values():
            it.reporter.gather_s = max(self.gather_s, gather_s(len(self.table)))
        member.reporter.report()
        return core

    def _pair(self, one: CoreWorker, other: CoreWorker) -> None:
        """One pair for any two, whichever way KV flows."""
        if one.is_alive and other.is_alive and one.incarnation not in other.ends.sinks:
            one.ends.pair(other, LinkId(next(self._links)))
            other.ends.pair(one, LinkId(next(self._links)))
            for core in (one, other):
                core.on_change(self.clock.now)

    def _ask_prefixes(self) -> None:
        assert self.router.prefixes is not None
        for member in self.members.values():
            asked = self.router.prefixes.take_ask(member.core.incarnation)
            if asked is not None:
                self.clock.send(lambda it=(member.reporter, asked): it[0].asked(it[1]))

    def settle(self) -> None:
        """Let every worker report its pairs."""
        members = self.members.values()
        self.run(lambda: all(it.worker.status.paired >= it.core.ends.sinks for it in members))

    def kill(self, core: CoreWorker) -> None:
        """The process is gone without a word."""
        # First: words of the steps that it has made have left; ``_tell`` takes none of a dead one.
        core.tell_all()
        core.is_alive = False
        member = self.members[core.incarnation]
        member.silent_at = self.clock.now
        heard_at = member.heard_at(self.clock.now) + self.clock.wire_s
        self.clock.at(heard_at + self.liveness.suspect_after_s, lambda: self._suspect(member))
        self.clock.at(heard_at + self.liveness.dead_after_s, lambda: self._lose(member))

    def worker(self, core: CoreWorker) -> Worker:
        return self.members[core.incarnation].worker

    def pool(self, core: CoreWorker) -> Pool:
        return pool_of(self.worker(core))

    def move(self, core: CoreWorker, home: str) -> Home:
        """Order it to another home; it says so with its next report."""
        self._orders += change_home(self.table, core.incarnation, home, next(self._order_numbers))
        wanted = self._orders[-1].home
        # Only the first: each goes out when the one before is confirmed (``change_home``).
        self._give_home(self._orders[0])
        return wanted

    def _give_home(self, order: HomeOrder) -> None:
        member = self.members[order.worker]

        def hear() -> None:
            member.home = member.home.after(order.home, member.worker.serves)
            member.core.on_change(self.clock.now)

        self.clock.send(hear)

    def _look_at_homes(self, worker: Worker) -> None:
        if not self._orders or self._orders[0].worker != worker.incarnation:
            return
        if is_confirmed(worker, self._orders[0].home):
            self._orders.pop(0)
            if self._orders:
                self._give_home(self._orders[0])

    def _read(self, member: Member, status: WorkerStatus, changes: KvChanges | None) -> None:
        worker, prefixes = member.worker, self.router.prefixes
        # It has ended since it sent this.
        if self.table.get(worker.incarnation) is None:
            return
        if self.table.report(worker, status, self.clock.now):
            if prefixes is not None and prefixes.joined(worker):
                self._ask_prefixes()
            self._look_again()
        self._reported(worker)
        if changes is not None and prefixes is not None and prefixes.told(worker, changes):
            self._ask_prefixes()
        self._look_at_homes(worker)

    def _suspect(self, member: Member) -> None:
        member.worker.is_silent = True
        self.table.note_usability()
        self._look_again()

    def _lose(self, member: Member) -> None:
        error = WorkerLost("it has been silent for too long")
        # First: who fails over must not find it in the table.
        self._forget(member)
        member.worker.lost()
        self._lost(member, error)
        self._unpair(member, error)

    def end(self, core: CoreWorker) -> None:
        """A worker that has drained ends in good order."""
        core.tell_all()
        core.is_alive = False
        member = self.members[core.incarnation]
        self._forget(member)
        self._unpair(member, WorkerLost("it has drained"))

    def _forget(self, member: Member) -> None:
        self.table.leave(member.core.incarnation)
        self.router.left(member.worker)
        self._look_again()

    def _unpair(self, member: Member, error: MeshError) -> None:
        for other in self.members.values():
            if other is not member and other.core.is_alive:
                other.core.catch_up()
                other.core.ends.lose(member.core, error)
                other.core.on_change(self.clock.now)

    def report_of(self, member: Member, load: WorkerStatus) -> WorkerStatus:
        """What a worker tells beside its load."""
        return load

    def _want(self, pair: PairWanted) -> None:
        """A decision would have used a pair that is not made yet, and another one will."""
        one, other = self.members[pair.prefill].core, self.members[pair.decode].core
        if self.table.ask_for(pair.prefill, pair.decode, self.clock.now):
            self.clock.after(PAIR_S, lambda: self._pair(one, other))
