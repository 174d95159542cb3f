"""Who is in the mesh, as a running thing: the peer table, one session task per worker, and the
routing policy.

Workers come and go through ``registry.py``; requests ask here for a pair. All state is soft: a
restarted gateway learns it again from the workers' reports within a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Sequence

import structlog

from services.gateway.core.index.prefixes import HashedPrompt, Indexed
from services.gateway.core.routing.expectations import WRONG, EndedAnswer
from services.gateway.core.routing.peer_table import OwnModel, PeerTable
from services.gateway.core.routing.pools import HomeOrder, change_home, is_confirmed
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import RouteDecision, RoutingPolicy
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Worker, WorkerStatus
from services.gateway.workers.peers import WorkerSession
from shared.errors import DeadlinePassed, WorkerLost
from shared.home import Home
from shared.ids import Incarnation, RandomBytes
from shared.kv.journal import KvChanges
from shared.messages.columns import pack_u32
from shared.rpc.network import Network
from shared.runtime.groups import TaskGroup, plain_errors
from shared.worker_status import GATHER_S, gather_s

_log = structlog.get_logger(__name__)

TAKEN_BY_QUEUE: dict[Indexed | None, str] = {
    Indexed.LEFT_OUT: "no room for a worker's prefixes (raise --index-memory-mib)",
    Indexed.UNPROVED: (
        "a worker's prefixes are never what it says of them (is its release another?)"
    ),
}

CONFIRM_S = 3.0
"""Longest wait for a worker's word that it has a new home."""


class News:
    """Something that may change again and again; who waits, waits for the next time."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        """Set once, at the next change; take a fresh one, before looking, for the change after."""

    def tell(self) -> None:
        """It has changed: wake everybody who waits."""
        self.next.set()
        self.next = asyncio.Event()


class Membership:
    """The gateway's view of its workers, while it is ``running``.

    random_bytes: for the policy, and for lease tokens.

    Three things change here. A worker's load changes with every report. Who may be chosen is
    ``usability``; of either ``on_news`` hears, at once (with the worker that reported). What
    workers are to be told (their standing partners, a pair to make, a new home) is ``directives``,
    of each apart: of a thousand one at a time is told of a pair.
    """

    def __init__(
        self,
        network: Network,
        policy: RoutingPolicy,
        incarnation: Incarnation,
        random_bytes: RandomBytes,
        own_model: OwnModel | None = None,
        index_bytes: int = 1 << 28,
    ) -> None:
        self.table = PeerTable(own_model)
        self.router = Router(policy, self.table, index_bytes=index_bytes)
        self.expectations, self.prefixes = self.router.expectations, self.router.prefixes
        self._network = network
        self.incarnation = incarnation
        self._random = random.Random(random_bytes(8)).random
        self.random_bytes = random_bytes
        self._tasks: asyncio.TaskGroup
        self.sessions: dict[Incarnation, WorkerSession] = {}
        self._session_tasks: dict[WorkerSession, asyncio.Task[None]] = {}
        self.usability = News()
        self.on_news: Callable[[Worker | None], None] = lambda worker: None
        self.directives: dict[Incarnation, News] = {}
        self.homes: dict[Incarnation, Home] = {}  # ordered, not confirmed yet
        self.pairs: dict[Incarnation, list[Worker]] = {}  # wanted, not told yet
        self._standing: tuple[Worker, ...] = ()
        self.gather_s = GATHER_S
        self._moving = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Membership]:
        """Own the sessions of all workers for the length of the block."""
        with plain_errors():
            async with TaskGroup() as self._tasks:
                try:
                    yield self
                finally:
                    # A session runs until it is cancelled: the group would wait for it.
                    for worker in self.table.workers:
                        self.leave(worker, "the gateway stops")

    # --- workers --------------------------------------------------------------------------------

    def join(self, worker: Worker) -> None:
        """Add a worker and open a session with it, unless it joins anew: then only its join stream
        has ended, and what runs over its session goes on.

        Raises IncompatiblePeer: it does not fit the workers that are here.
        """
        now = worker.reported_at = asyncio.get_running_loop().time()
        self.table.join(worker)
        self.directives.setdefault(worker.incarnation, News())
        if (session := self.sessions.get(worker.incarnation)) is not None:
            session.worker = worker
        else:
            session = self.sessions[worker.incarnation] = WorkerSession(
                worker,
                self._network,
                self.incarnation,
                self.note_usability,
            )
            self._session_tasks[session] = self._tasks.create_task(session.run())
        _log.info(
            "worker joined",
            worker=worker.incarnation,
            role=worker.role.value,
            address=f"{worker.host}:{worker.port}",
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            at_s=now,
        )
        if self.prefixes is not None and self.prefixes.joined(worker):
            self._tell_asked()  # with the second one, those that were here are asked, too
        self._note_change()

    def is_here(self, worker: Worker) -> bool:
        """Whether this entry is its worker's: no rejoin has replaced it, and it has not left."""
        return self.table.get(worker.incarnation) is worker

    def update(self, incarnation: Incarnation, status: WorkerStatus) -> None:
        worker = self.table.get(incarnation)
        now = asyncio.get_running_loop().time()
        if worker is None:
            return
        if self.table.report(worker, status, now):
            # That it is colocated shows in its reports.
            if self.prefixes is not None and self.prefixes.joined(worker):
                self._tell_asked()
            self._note_change()
        self.on_news(worker)

    def told_prefixes(self, worker: Worker, changes: KvChanges) -> None:
        if self.prefixes is None:
            return
        before, _ = self.prefixes.known(worker) or (None, 0)
        if self.prefixes.told(worker, changes):
            if before is not Indexed.LEFT_OUT:
                _log.warning("prefixes differ: asked for all of them", worker=worker.incarnation)
            self._tell_asked()
        now, _ = self.prefixes.known(worker) or (None, 0)
        if now in TAKEN_BY_QUEUE and now is not before:
            _log.warning(
                f"{TAKEN_BY_QUEUE[now]}: it is taken by its queue alone",
                worker=worker.incarnation,
            )

    def _tell_asked(self) -> None:
        for incarnation in self.prefixes.to_ask if self.prefixes is not None else ():
            self.directives[incarnation].tell()

    def pair_failed(self, prefill: Incarnation, decode: Incarnation) -> None:
        if self.table.pair_failed(prefill, decode):
            self._tell_usability()

    def drains(self, incarnation: Incarnation) -> None:
        if self.table.drains(incarnation):
            self._tell_usability()

    def leave(self, worker: Worker, reason: str) -> None:
        """Remove a worker; requests on it fail over. An entry that a rejoin has replaced stays."""
        incarnation = worker.incarnation
        if not self.is_here(worker):
            return
        self.table.leave(incarnation)
        self.router.left(worker)
        self.pairs.pop(incarnation, None)
        del self.directives[incarnation]
        session = self.sessions.pop(incarnation)
        self._session_tasks.pop(session).cancel()
        session.abandon(WorkerLost(f"the worker left the mesh: {reason}"))
        is_orderly = worker.status.is_draining
        say = _log.info if is_orderly else _log.warning
        reason = "it has drained" if is_orderly else reason
        say(
            "worker left",
            worker=incarnation,
            role=worker.role.value,
            reason=reason,
            at_s=asyncio.get_running_loop().time(),
        )
        self._note_change()

    def note_usability(self) -> None:
        """A worker's session came, went, fell silent or speaks again."""
        self.table.note_usability()
        self._tell_usability()

    def _tell_usability(self) -> None:
        self.usability.tell()
        self.on_news(None)

    def _note_change(self) -> None:
        self._tell_usability()
        standing, pace = self.table.at_home_with_tokens, gather_s(len(self.table))
        if self._standing is not standing or self.gather_s != pace:
            self._standing, self.gather_s = standing, pace
            self.tell_all()

    def tell_all(self) -> None:
        """There may be a directive for every worker."""
        for news in self.directives.values():
            news.tell()

    async def change_home(self, incarnation: Incarnation, home: str) -> Worker:
        """Have a worker change what it is at home; returns it once it has said so.

        One after the other. Raises NotFound, InvalidRequest: see ``pools.change_home`` and
        ``is_confirmed``. WorkerLost: it left meanwhile. DeadlinePassed: it did not say so in time.
        """
        async with self._moving:  # the rule for the last one of a role counts what is settled
            number = int.from_bytes(self.random_bytes(8), "little")
            *before, move = change_home(self.table, incarnation, home, number)
            for order in before:
                await self._give_home(order)
            return await self._give_home(move)

    async def _give_home(self, order: HomeOrder) -> Worker:
        incarnation, wanted = order
        self.homes[incarnation] = wanted
        self.directives.get(incarnation, News()).tell()  # it may have left
        home = wanted.role.value
        _log.info("home ordered", worker=incarnation, home=home, epoch=wanted.epoch)
        try:
            async with asyncio.timeout(CONFIRM_S):
                while True:
                    changed = self.usability.next
                    worker = self.table.get(incarnation)
                    if worker is None:
                        raise WorkerLost("the worker left the mesh before it moved")
                    if is_confirmed(worker, wanted):
                        return worker
                    await changed.wait()
        except TimeoutError:
            raise DeadlinePassed(
                f"worker {incarnation:016x} did not confirm within {CONFIRM_S:g} s: it may still "
                "move; look at `pdmesh top`"
            ) from None
        finally:
            del self.homes[incarnation]

    def learn(self, came: EndedAnswer) -> None:
        """An answer is over: predictions are held against it."""
        is_believed = self.router.learn(came, asyncio.get_running_loop().time())
        if is_believed:
            _log.info("predictions come true again: routed by them", worker=came.prefill)
        elif is_believed is not None:
            reason = f"half of the last minute's were off by more than {WRONG:.0%}"
            _log.warning(
                "predictions are wrong: routed by load alone", worker=came.prefill, reason=reason
            )

    # --- requests -------------------------------------------------------------------------------

    def prompt(self, token_ids: Sequence[int], salt: bytes) -> HashedPrompt | None:
        """See ``RouteRequest``; None where the policy does not go by it."""
        return HashedPrompt(pack_u32(token_ids), salt) if self.router.needs_prompt else None

    def route(self, request: RouteRequest) -> RouteDecision | None:
        """Choose a pair, or None if none can take the request now."""
        now = asyncio.get_running_loop().time()
        decision, wanted = self.router.route(request, now, self._random())
        # A decision would have used these pairs, and another one will.
        for worker, peer in wanted:
            known = self.table.get(peer)
            if known is not None and self.table.ask_for(worker, peer, now):
                self.pairs.setdefault(worker, []).append(known)
                self.directives[worker].tell()
        return decision
